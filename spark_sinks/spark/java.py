"""The driver's JVM: fast lookup of its classes, and Hadoop's file systems."""

from __future__ import annotations

from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import SparkSession


def java_class(spark: SparkSession, name: str) -> Any:
    """Return a class by its full name; a caller that needs it again should keep it.

    Looking it up part by part (`jvm.org.apache...`) makes Java search for each part in every package that Spark has
    imported, in each of four hundred jars. A job with short batches spent a fifth of its CPU time on that.
    """
    return getattr(spark._jvm, name)


class Files:
    """The Hadoop file system of a directory or URL, such as a checkpoint or an archive. All names are full names."""

    def __init__(self, spark: SparkSession, of: str) -> None:
        self._path_of = java_class(spark, "org.apache.hadoop.fs.Path")
        self._io = java_class(spark, "org.apache.commons.io.IOUtils")
        self._system = self._path_of(of).getFileSystem(spark._jsc.hadoopConfiguration())

    def exists(self, name: str) -> bool:
        """Whether a file or directory exists."""
        return bool(self._system.exists(self._path_of(name)))

    def names(self, directory: str) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        path = self._path_of(directory)
        listed = self._system.listStatus(path) if self._system.exists(path) else ()
        return [status.getPath().getName() for status in listed]

    def make(self, name: str) -> None:
        """Create a directory and its parents."""
        self._system.mkdirs(self._path_of(name))

    def delete(self, name: str) -> None:
        """Delete a file, or a directory recursively; no error if it does not exist."""
        self._system.delete(self._path_of(name), True)

    def rename(self, name: str, new: str) -> bool:
        """Rename, atomically if the file system can; False if it failed."""
        return bool(self._system.rename(self._path_of(name), self._path_of(new)))

    def read(self, name: str) -> str | None:
        """Return the text of a file; None if it does not exist."""
        path = self._path_of(name)
        if not self._system.exists(path):
            return None
        stream = self._system.open(path)
        try:
            return str(self._io.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, name: str, text: str) -> bool:
        """Write a file that does not exist; False if it does."""
        path = self._path_of(name)
        try:
            stream = self._system.create(path, False)
        except Py4JJavaError:
            if self._system.exists(path):
                return False
            raise
        try:
            stream.write(text.encode())
        finally:
            stream.close()
        return True

    def replace(self, name: str, text: str, new: str) -> bool:
        """Write a file under the name `new`, and rename it to `name`; False if that failed."""
        stream = self._system.create(self._path_of(new), True)
        try:
            stream.write(text.encode())
        finally:
            stream.close()
        self.delete(name)  # Hadoop's rename does not replace
        return self.rename(new, name)
