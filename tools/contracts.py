"""Our own contract for import-linter: the core imports no optional part, and a part only those that it needs."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from gateway.runtime.parts import PARTS, part_of

PRODUCT = ("flowcontrol", "gateway", "kafka_records", "mapping", "protocols", "spark_sinks", "telemetry")


class CoreImportsNoPart(Contract):
    """What imports a module of a part of `gateway.runtime.parts` belongs to it, or to a part that `needs` it."""

    type_name = "core_imports_no_part"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the imports into a part from elsewhere."""
        named = {name for part in PARTS.values() for name in (part.entry, part.command, *part.modules) if name}
        broken = sorted(
            (importer, imported)
            for importer in graph.modules
            if importer.split(".")[0] in PRODUCT
            for imported in graph.find_modules_directly_imported_by(importer)
            if part_of(imported) not in _allowed(part_of(importer))
        )
        missing = sorted(named - graph.modules)
        return ContractCheck(kept=not broken and not missing, metadata={"imports": broken, "missing": missing})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports."""
        metadata: dict[str, Any] = check.metadata
        for importer, imported in metadata["imports"]:
            output.print_error(f"{importer} imports {imported}, of the optional part `{part_of(imported)}`")
        for name in metadata["missing"]:
            output.print_error(f"{name} is in gateway.runtime.parts and does not exist")


def _allowed(importer: str | None) -> set[str | None]:
    """Return the parts that a part may import, besides the core."""
    return {None} if importer is None else {None, importer, *PARTS[importer].needs}
