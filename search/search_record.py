"""What a run leaves in its storage of the search as a whole.

A search of one layer is that of its study. One of several has an index besides, a study without
trials under the search's own name, which lists them: so optuna-dashboard shows one study for each
size, and each can be reported alone.
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
    """A run of a search, as it was when it was last kept.

    Args:
        request: What was asked, with batch, device and output folder resolved.
        unmet: As in `SearchResult`.
        whole: As in `SearchResult`.
        stopped: As in `SearchResult`.
        seconds: How long it took.
    """

    request: SearchRequest
    unmet: Mapping[Dims, str] = field(default_factory=dict)
    whole: WholeModel | None = None
    stopped: str | None = "interrupted"
    seconds: float = 0.0

    def keep(self, index: optuna.Study) -> None:
        """Write it into the index, in place of the last one."""
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
    def kept(cls, study: optuna.Study) -> SearchRecord:
        """The last one of an index, or that of a layer's study alone.

        Raises:
            InvalidInputError: As `LayerRecord.kept`.
        """
        value = study.user_attrs.get(_KEY)
        if value is None:
            layer = LayerRecord.kept(study)
            request = SearchRequest.of_layer(layer.request)
            return cls(request, stopped=layer.stopped, seconds=layer.seconds)
        with readable(study, value):
            return cls._read(value)

    @classmethod
    def _read(cls, value: Mapping[str, Any]) -> SearchRecord:
        """What `keep` wrote."""
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
        """What the search came to, of what its layers did."""
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
        """What the studies in a storage come to, without measuring.

        Raises:
            InvalidInputError: One of the studies is not there, or cannot be read.
        """
        layers = []
        for one in self.request.layers:
            if one.size not in self.unmet:
                study = storage.load(one.study)
                layers.append(layer_result(study, LayerRecord.kept(study), replayed=True))
        return self.result(layers, folder, replayed=True)
