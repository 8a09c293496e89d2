"""Record of a whole search in its storage.

A search of one layer has only the record of its study. One of several also has an index, a study
without trials under the search's own name, which lists them: so optuna-dashboard shows one study
for each size, and each can be reported alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import optuna

from ksopt.measure.timing import Measurement
from ksopt.patterns.size import Dims
from ksopt.search.layer_record import LayerRecord, layer_result, readable, shown
from ksopt.search.request import SearchRequest
from ksopt.search.results import SCHEMA, LayerResult, SearchResult, WholeModel
from ksopt.search.storage import Storage

_KEY = "layers"


@dataclass(frozen=True)
class SearchRecord:
    """A run of a search, as last saved.

    Args:
        request: With batch, device and output folder resolved.
        unmet: As in `SearchResult`.
        whole: As in `SearchResult`.
        stopped: As in `SearchResult`.
        seconds: Duration of the run.
    """

    request: SearchRequest
    unmet: Mapping[Dims, str] = field(default_factory=dict)
    whole: WholeModel | None = None
    stopped: str | None = "interrupted"
    seconds: float = 0.0

    def save(self, index: optuna.Study) -> None:
        """Store the record in the index, in place of the last one."""
        value = {
            "schema": SCHEMA,
            "request": shown(self.request.to_json()),
            "unmet": {str(dims): sentence for dims, sentence in self.unmet.items()},
            "whole": None if self.whole is None else asdict(self.whole),
            "stopped": self.stopped,
            "seconds": self.seconds,
        }
        index.set_user_attr(_KEY, value)

    @classmethod
    def load(cls, study: optuna.Study) -> SearchRecord:
        """The last record of an index, or that of a single layer's study.

        Raises:
            InvalidInputError: As `LayerRecord.load`.
        """
        value = study.user_attrs.get(_KEY)
        if value is None:
            layer = LayerRecord.load(study)
            request = SearchRequest.of_layer(layer.request)
            return cls(request, stopped=layer.stopped, seconds=layer.seconds)
        with readable(study, value):
            return cls._read(value)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> SearchRecord:
        """The inverse of `save`."""
        whole = value["whole"]
        if whole is not None:
            times = {name: Measurement(**whole[name]) for name in ("dense", "planned")}
            whole = WholeModel(**{**whole, **times})
        return cls(
            SearchRequest.from_json(value["request"]),
            {Dims.parse(dims): sentence for dims, sentence in value["unmet"].items()},
            whole,
            value["stopped"],
            value["seconds"],
        )

    def result(
        self, layers: Sequence[LayerResult], folder: Path, replayed: bool = False
    ) -> SearchResult:
        """The result of the search, from those of its layers."""
        return SearchResult(
            self.request,
            tuple(layers),
            self.unmet,
            self.stopped,
            self.seconds,
            folder,
            self.whole,
            replayed,
        )

    def replayed(self, storage: Storage, folder: Path) -> SearchResult:
        """The result of the studies in a storage, without measuring.

        Raises:
            InvalidInputError: One of the studies is missing, or cannot be read.
        """
        layers = []
        for one in self.request.layers:
            if one.size not in self.unmet:
                study = storage.load(one.study)
                layers.append(layer_result(study, LayerRecord.load(study), replayed=True))
        return self.result(layers, folder, replayed=True)
