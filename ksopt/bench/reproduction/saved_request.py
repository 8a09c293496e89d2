"""The request of a folder, saved in it so that any machine can write the report again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ksopt.bench.reproduction.request import PaperRequest
from ksopt.bench.reproduction.tables_and_figures import ENERGY, ITEMS, PRODUCTS, Item
from ksopt.errors import InvalidInputError
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, write_whole

FILE = "asked.json"


@dataclass(frozen=True)
class SavedRequest:
    """The part of a request that its report needs.

    Attributes:
        items: the tables and figures.
        is_small: whether small patterns and models replace the paper's.
        remarks: sentences that name each omission or smaller size.
        populations: number of patterns in all, by kind.
    """

    items: tuple[Item, ...]
    is_small: bool
    remarks: tuple[str, ...]
    populations: Mapping[str, int]

    @classmethod
    def of(cls, request: PaperRequest) -> SavedRequest:
        """The part of ``request`` to save."""
        populations = {kind: request.population(kind) for kind in (PRODUCTS, ENERGY)}
        return cls(request.items, request.is_small, request.remarks, populations)

    @classmethod
    def read(cls, folder: Path) -> SavedRequest:
        """The saved request of a folder.

        Raises:
            InvalidInputError: the folder was not written by `ksopt bench paper`.
        """
        value = untrusted.json_of(folder / FILE, "the file")
        with untrusted.of_its_form(f"{folder / FILE}", "`ksopt bench paper` did not write it so"):
            by_name = {item.name: item for item in ITEMS}
            return cls(
                tuple(by_name[name] for name in value["items"]),
                bool(value["small"]),
                tuple(map(str, value["remarks"])),
                {str(kind): int(count) for kind, count in value["populations"].items()},
            )

    def merge_into(self, folder: Path) -> SavedRequest:
        """Merge this request with the folder's earlier ones, and write the result to it.

        Raises:
            InvalidInputError: one request has small patterns and models and the other has not, or
                the folder cannot be written.
        """
        remarks, items = self.remarks, set(self.items)
        if (folder / FILE).exists():
            before = SavedRequest.read(folder)
            if before.is_small != self.is_small:
                there, here = (
                    "small models" if one.is_small else "the paper's models"
                    for one in (before, self)
                )
                raise InvalidInputError(
                    f"{folder} holds {there}, and {here} are asked for: choose another --out"
                )
            items |= set(before.items)
            remarks = tuple(dict.fromkeys((*before.remarks, *remarks)))
        whole = SavedRequest(
            tuple(item for item in ITEMS if item in items), self.is_small, remarks, self.populations
        )
        value = {
            "items": [item.name for item in whole.items],
            "small": whole.is_small,
            "remarks": list(whole.remarks),
            "populations": dict(whole.populations),
        }
        try:
            make_folder(folder)
            write_whole(folder / FILE, json.dumps(value, indent=2) + "\n")
        except (OSError, ValueError) as error:
            raise InvalidInputError(
                f"the output folder {folder} cannot be written ({untrusted.reason(error)}): "
                "choose another with --out"
            ) from None
        return whole
