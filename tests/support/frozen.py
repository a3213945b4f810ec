"""A process that SIGSTOP has reached: the signal comes when it comes, and to each thread for itself."""

from pathlib import Path

from tests.support.gateway import wait_until


async def until_frozen(pid: int) -> None:
    """Wait until every thread of a process has stopped."""

    def all_stopped() -> bool:
        threads = Path(f"/proc/{pid}/task").glob("*/stat")
        return all(path.read_text().rpartition(")")[2].split()[0] == "T" for path in threads)

    await wait_until(all_stopped)
