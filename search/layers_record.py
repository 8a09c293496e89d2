"""What a search of several sizes leaves in its storage besides the studies: the list of them.

It stands in a study without trials, the index, under the name that the search was given. So the
report can be written again without the device, and optuna-dashboard shows one study for each size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import optuna

from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.search.layers_request import LayersRequest
from ksopt.search.layers_result import LayersResult, Whole
from ksopt.search.report.layers_export import SCHEMA
from ksopt.search.request import Dims, without_password
from ksopt.search.run_record import RunRecord, result_of
from ksopt.search.storage import Storage

_KEY = "layers"


@dataclass(frozen=True)
class LayersRecord:
    """A search of several sizes, as it was when it was last kept.

    Args:
        request: What was asked, with batch, device and output folder resolved.
        unmet: As in `LayersResult`.
        whole: As in `LayersResult`.
        stopped: As in `LayersResult`.
        seconds: How long it took.
    """

    request: LayersRequest
    unmet: Mapping[Dims, str] = field(default_factory=dict)
    whole: Whole | None = None
    stopped: str | None = "interrupted"
    seconds: float = 0.0

    def keep(self, index: optuna.Study) -> None:
        """Write it into the index, in place of the last one."""
        each = self.request.each
        storage = None if each.storage is None else without_password(each.storage)
        request = replace(self.request, each=replace(each, storage=storage))
        whole = self.whole
        value = {
            "schema": SCHEMA,
            "request": request.to_json(),
            "unmet": {str(dims): sentence for dims, sentence in self.unmet.items()},
            "whole": None if whole is None else asdict(whole),
            "stopped": self.stopped,
            "seconds": self.seconds,
        }
        index.set_user_attr(_KEY, value)

    @classmethod
    def kept(cls, index: optuna.Study) -> LayersRecord | None:
        """The last one that was kept; None if the study is no index.

        Raises:
            InvalidInputError: Another version of ksopt wrote it in a way that is not known here.
        """
        value = index.user_attrs.get(_KEY)
        if value is None:
            return None
        if value.get("schema") != SCHEMA:
            raise InvalidInputError(
                f"the study {index.study_name!r} was written as {value.get('schema')!r}, and this "
                f"version of ksopt reads {SCHEMA!r}: use the version that wrote it"
            )
        whole = value["whole"]
        if whole is not None:
            times = {name: Measurement(**whole[name]) for name in ("dense", "planned")}
            whole = Whole(**{**whole, **times})
        return cls(
            LayersRequest.from_json(value["request"]),
            {Dims.parse(dims): sentence for dims, sentence in value["unmet"].items()},
            whole,
            value["stopped"],
            value["seconds"],
        )


def replayed(record: LayersRecord, storage: Storage, folder: Path) -> LayersResult:
    """What the studies in a storage come to, without measuring.

    Raises:
        InvalidInputError: One of the studies is not there.
    """
    results = []
    for one in record.request.requests:
        if one.size not in record.unmet:
            study = storage.load(one.study)
            results.append(result_of(study, RunRecord.kept(study), folder, replayed=True))
    return LayersResult(
        record.request,
        tuple(results),
        record.unmet,
        record.stopped,
        record.seconds,
        folder,
        record.whole,
        replayed=True,
    )
