"""The request of a folder, saved in it: its report can be written again on any machine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ksopt.bench.reproduction.catalogue import ENERGY, ITEMS, PRODUCTS, Item
from ksopt.bench.reproduction.request import PaperRequest
from ksopt.errors import InvalidInputError
from ksopt.system import untrusted
from ksopt.system.atomic_files import make_folder, write_whole

FILE = "asked.json"


@dataclass(frozen=True)
class SavedRequest:
    """What a report says of its request.

    Attributes:
        items: the tables and figures.
        is_small: whether patterns and models are small ones in the place of the paper's.
        remarks: what is left out or smaller, in sentences.
        populations: how many patterns there are where all are measured, by kind.
    """

    items: tuple[Item, ...]
    is_small: bool
    remarks: tuple[str, ...]
    populations: Mapping[str, int]

    @classmethod
    def of(cls, request: PaperRequest) -> SavedRequest:
        """A request's."""
        populations = {kind: request.population(kind) for kind in (PRODUCTS, ENERGY)}
        return cls(request.items, request.is_small, request.remarks, populations)

    @classmethod
    def read(cls, folder: Path) -> SavedRequest:
        """A folder's.

        Raises:
            InvalidInputError: the folder is not one of `ksopt bench paper`.
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

    def kept(self, folder: Path) -> SavedRequest:
        """The same with what the folder was asked for before, written to it.

        Raises:
            InvalidInputError: the folder holds small patterns and models and these are not, or the
                other way round, or it cannot be written.
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
