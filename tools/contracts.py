"""Our own contract for import-linter: the core imports no optional part."""

from __future__ import annotations

from typing import Any

from grimp import ImportGraph
from importlinter import Contract, ContractCheck, output

from gateway.runtime.parts import PARTS, part_of

PRODUCT = ("flowcontrol", "gateway", "kafka_records", "mapping", "protocols", "telemetry")


class CoreImportsNoPart(Contract):
    """Every module of the product that belongs to no part of `gateway.runtime.parts` imports none that does."""

    type_name = "core_imports_no_part"

    def check(self, graph: ImportGraph, verbose: bool) -> ContractCheck:
        """Find the imports from the core into a part."""
        missing = sorted({name for part in PARTS.values() for name in (part.entry, *part.modules)} - graph.modules)
        found = sorted(
            (importer, imported)
            for importer in graph.modules
            if importer.split(".")[0] in PRODUCT and part_of(importer) is None
            for imported in graph.find_modules_directly_imported_by(importer)
            if part_of(imported) is not None
        )
        return ContractCheck(kept=not found and not missing, metadata={"imports": found, "missing": missing})

    def render_broken_contract(self, check: ContractCheck) -> None:
        """Print the imports."""
        metadata: dict[str, Any] = check.metadata
        for importer, imported in metadata["imports"]:
            output.print_error(f"{importer} imports {imported}, of the optional part `{part_of(imported)}`")
        for name in metadata["missing"]:
            output.print_error(f"{name} is in gateway.runtime.parts and does not exist")
