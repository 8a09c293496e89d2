"""The backend's report on a model: the table, its files, the command."""

import json
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import ksopt
from ksopt.cli import main
from ksopt.compile import backend, collected
from ksopt.compile.end_to_end import EndToEnd
from ksopt.compile.explain import Explanation
from ksopt.compile.lowering.site_times import Times
from ksopt.compile.sites import Decision, LaunchTimes, Place, Report, Site, Verdict
from ksopt.errors import InvalidInputError
from ksopt.measure.timing import Measurement
from ksopt.patterns.chain import Chain


class Mixed(nn.Module):
    """One site of each verdict but NOT_LOWERED, and a dense layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.Parameter(torch.randn(4, 8, 8) / 3)
        self.bias = nn.Parameter(torch.randn(32))
        self.dense = nn.Linear(32, 32)
        self.precise = nn.Parameter(torch.randn(4, 8, 8, dtype=torch.float64) / 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        y = torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), self.blocks).flatten(1)
        y = F.gelu(y + self.bias, approximate="tanh") + x
        z = torch.einsum("bgi,goi->bgo", self.dense(y).double().view(-1, 4, 8), self.precise)
        return z.flatten(1) + torch.rand(())


def test_it_tells_lowered_from_not_recognised_and_why():
    model, x = Mixed(), torch.randn(6, 32)
    state = torch.get_rng_state()
    explanation = ksopt.explain(model, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.calls == 0
    lowered, missed = explanation.sites
    assert lowered.verdict is Verdict.LOWERED
    assert (str(lowered.chain), lowered.batch, lowered.dtype) == ("(4,8,8,1)", 6, "float32")
    assert lowered.epilogue == ()  # the graph writes a buffer in place
    assert lowered.flops == 2 * 6 * 4 * 8 * 8
    assert lowered.place.file == __file__
    assert "self.blocks" in lowered.place.code
    assert missed.verdict is Verdict.NOT_RECOGNISED
    assert missed.reason.startswith("At node ")
    assert "float64" in missed.reason
    # Linear flops: two block-diagonal layers of 4 * 8 * 8 weights, a dense one of 32 * 32.
    assert explanation.report.linear_flops == 2 * 6 * (256 + 256 + 1024)
    assert explanation.report.covered == pytest.approx(256 / 1536)


def test_a_layer_that_no_line_of_the_author_calls_has_its_name_in_the_model():
    layers = [ksopt.KSLinear(8, 8, "(1,4,4,2)*(2,4,4,1)") for _ in range(2)]
    model = nn.Sequential(layers[0], nn.Sequential(nn.ReLU(), layers[1]))
    explained = ksopt.explain(model, torch.randn(3, 8))
    assert [str(site.place) for site in explained.sites] == ["0", "1.1"]


def test_it_names_what_a_launch_could_compute_behind_the_product():
    model, x = Mixed(), torch.randn(6, 32)

    def layer(x):
        y = torch.einsum("bgi,goi->bgo", x.view(-1, 4, 8), model.blocks).flatten(1)
        return F.gelu(y + model.bias, approximate="tanh") + x

    (site,) = ksopt.explain(layer, x).sites
    assert site.epilogue == ("bias", "gelu_tanh", "residual")


def test_a_dynamic_batch_is_counted_as_it_is_at_hand():
    explanation = ksopt.explain(Mixed(), torch.randn(6, 32), dynamic=True)
    assert explanation.sites[0].batch == 6
    assert explanation.report.linear_flops == 2 * 6 * (256 + 256 + 1024)


def test_markdown_and_json_hold_the_same_and_no_weight():
    model = Mixed()
    with torch.no_grad():
        model.blocks.fill_(0.123456)
    explanation = ksopt.explain(model, torch.randn(6, 32))
    text = explanation.markdown()
    values = json.loads(json.dumps(explanation.to_json()))
    assert [site["verdict"] for site in values["sites"]] == ["lowered", "not recognised"]
    for site in explanation.sites:
        assert site.reason in text
    assert str(explanation).count("test_explain.py:") == 2
    assert "0.1234" not in text + json.dumps(values) + str(explanation)


def with_times(predicted, measured):
    decision = Decision(True, "It was decided.", predicted, measured)
    chain = Chain.parse("(1,8,4,8)*(4,8,16,1)")
    place = Place("/home/someone/layers.py", 118)
    epilogue = ("bias", "gelu")
    one = Site(
        "n", place, "einsum + bmm", Verdict.NOT_LOWERED, "", chain, 25_088, "bfloat16", epilogue
    )
    return one.decided(decision)


def test_predicted_and_measured_times_stand_beside_each_other():
    both = Times(1012.34, 2025.0)
    explanation = Explanation(
        Report(
            [with_times(both, Times(10.5, 23.9)), with_times(both, None), with_times(None, None)]
        )
    )
    cells = [("1012.3 / 2025.0", "10.5 / 23.9"), ("1012.3 / 2025.0", "-"), ("-", "-")]
    for table in (explanation.table(), explanation.overview()):
        at = [next(i for i, head in enumerate(table.heads) if head.startswith(name))
              for name in ("predicted us", "measured us")]  # fmt: skip
        assert [tuple(row[i] for i in at) for row in table.rows] == cells
    assert "| 1012.3 / 2025.0 | 10.5 / 23.9 |" in explanation.markdown()
    assert "(ksopt / Inductor)" in explanation.markdown()
    sites = json.loads(json.dumps(explanation.to_json()))["sites"]
    assert sites[0]["predicted"] == {"ksopt_us": 1012.34, "unfused_us": 2025.0}
    assert sites[0]["measured"] == {"ksopt_us": 10.5, "unfused_us": 23.9}
    assert sites[1]["measured"] is sites[2]["predicted"] is None


def test_the_time_of_one_launch_for_all_of_a_site_is_beside_that_of_its_products():
    site = with_times(None, Times(10.5, 23.9))
    sites = [
        replace(site, one_launch=("bias",), launch_times=LaunchTimes(9.0, 12.34)),
        replace(site, one_launch=("bias",), launch_times=LaunchTimes(9.0)),
        site,
    ]
    explanation = Explanation(Report(sites))
    lines = explanation.details().splitlines()
    assert [line.partition("It was decided.")[2] for line in lines] == [
        *(" All of it, us: 12.3 measured.", " All of it, us: 9.0 predicted.", "")
    ]
    table = explanation.table()
    at = table.heads.index("all of it, us")
    assert [row[at] for row in table.rows] == ["12.3 measured", "9.0 predicted", "-"]
    values = explanation.to_json()["sites"]
    assert values[0]["launch_times"] == {"predicted_us": 9.0, "measured_us": 12.34}
    assert values[2]["launch_times"] is None


def test_the_table_fits_in_100_columns_and_its_details_follow():
    explanation = Explanation(Report([with_times(Times(1012.34, 2025.0), Times(10.5, 23.9))]))
    lines = str(explanation).splitlines()
    lines = lines[lines.index("us of the products: ksopt / Inductor") :]
    assert all(len(line) <= 100 for line in lines[:3])
    assert lines[2].startswith("1  layers.py:118  (1,8,4,8)*(4,8,16,1)  25088  bfloat16  ")
    assert lines[3] == "1  einsum + bmm, then bias, then gelu: It was decided."


@pytest.mark.slow
def test_times_of_the_whole_model_on_request():
    model = nn.Conv1d(8, 8, 1, groups=2)
    explanation = ksopt.explain(model, torch.randn(3, 8, 5), timed=True)
    assert explanation.end_to_end is not None
    values = explanation.to_json()["end_to_end"]
    assert values["speedup"] == values["inductor_us"] / values["ksopt_us"] > 0
    # How much faster the model is comes first.
    assert str(explanation).startswith("With ksopt the model is ")
    assert "a call takes" in str(explanation).splitlines()[0]


@pytest.mark.parametrize(
    ("ksopt_us", "words"),
    [(500.0, "2.00 times as fast"), (2000.0, "0.50 times as fast"), (990.0, "within noise")],
)
def test_the_answer_is_how_much_faster_the_model_is(ksopt_us, words):
    def around(us):
        return Measurement(us, 0.98 * us, 1.02 * us, 20)

    times = EndToEnd(around(1000.0), around(ksopt_us))
    site = with_times(None, None)
    assert words in Explanation(Report([site]), times).summary().splitlines()[0]


def test_a_model_that_cannot_be_timed_is_explained_all_the_same(monkeypatch):
    def no_compiler(*arguments):
        raise RuntimeError("No C++ compiler\nand more")

    monkeypatch.setattr("ksopt.compile.explain.measured", no_compiler)
    explanation = ksopt.explain(nn.Conv1d(8, 8, 1, groups=2), torch.ones(3, 8, 5), timed=True)
    assert explanation.end_to_end is None
    assert [site.verdict for site in explanation.sites] == [Verdict.LOWERED]
    assert (
        "Note: the model could not be timed: RuntimeError: No C++ compiler."
        in explanation.summary()
    )


def test_an_ordinary_model_gets_advice_on_its_dense_layers():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    explanation = ksopt.explain(model, torch.randn(3, 8), timed=True)
    assert explanation.end_to_end is None  # both ways are the same
    assert "as fast as under Inductor alone" in explanation.answer()
    assert "2 dense linear layers: ksopt search --model" in explanation.summary()
    assert explanation.to_json()["dense_layers"] == 2


def test_a_compile_that_finds_nothing_says_so_in_the_log(compiled_by_eager, caplog):
    with caplog.at_level("INFO", logger="ksopt"):
        torch.compile(nn.Linear(8, 8), backend="ksopt")(torch.ones(2, 8))
    assert any("no product of this graph" in record.getMessage() for record in caplog.records)


def test_wrong_arguments_are_refused_in_words():
    with pytest.raises(InvalidInputError, match="options\\['tune'\\] is 'fast'"):
        ksopt.explain(nn.Linear(2, 2), torch.ones(1, 2), tune="fast")


def test_a_setting_that_is_no_word_is_not_the_models_fault(monkeypatch):
    monkeypatch.setenv("KSOPT_TUNE", "sometimes")
    with pytest.raises(InvalidInputError, match="KSOPT_TUNE is 'sometimes'"):
        ksopt.explain(ksopt.KSLinear(32, 32, "(1,8,8,4)*(4,8,8,1)"), torch.randn(6, 32))


def test_a_report_without_products_covers_nothing():
    report = Report()
    report.add(Report(sites=[Site("n", ksopt_place(), "mm", Verdict.NOT_LOWERED, "")], graphs=1))
    assert (report.covered, report.count(Verdict.NOT_LOWERED), report.graphs) == (0.0, 1, 1)


def ksopt_place():
    return Place()


@pytest.fixture
def in_folder(tmp_path, monkeypatch):
    (tmp_path / "explained_model.py").write_text(
        "import torch\ndef build():\n    return torch.nn.Conv1d(8, 8, 1, groups=2)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_command_prints_and_writes(in_folder, capsys):
    arguments = ["explain", "explained_model:build", "--input", "3x8x5"]
    assert main.main([*arguments, "--out", "e.md"]) == 0
    output = capsys.readouterr().out
    assert "(2,4,4,1)" in output
    assert "1 lowered" in output
    assert "| (2,4,4,1) |" in (in_folder / "e.md").read_text(encoding="utf-8")
    assert output.startswith("With ksopt the model is ")
    assert (
        main.main([*arguments, "--no-time", "--json", "--train", "--dynamic", "--tune", "off"]) == 0
    )
    values = json.loads(capsys.readouterr().out)
    assert values["sites"][0]["chain"] == "(2,4,4,1)"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--input", "3y8"], "write sizes with x between them"),
        (["--input", "3x8:complex64"], "write sizes with x between them"),
        (["--input", "3x8x5", "--dtype", "int8"], "it must be float32, float16 or bfloat16"),
        (["--input", "3x8x5", "--out", "e.txt"], "must end in .md or .json"),
        (["--input", "3x8x5", "--out", "no/e.md"], "there is no folder no"),
        (["--input", "3x8x5", "--device", "gpu"], "write cpu, cuda, cuda:1"),
        (["--input", "3x8x5", "--tune", "fast"], "--tune 'fast': it must be model, measure or off"),
    ],
)
def test_the_command_refuses_in_words(more, message, in_folder, capsys):
    assert main.main(["explain", "explained_model:build", *more]) == 2
    assert message in capsys.readouterr().err


def test_the_command_names_the_model_as_typed(in_folder, capsys):
    assert main.main(["explain", "explained_model:none", "--input", "3x8x5"]) == 2
    sentence = capsys.readouterr().err.splitlines()[-1]
    assert sentence.startswith("ksopt: explain explained_model:none: explained_model has no")


@pytest.fixture
def of_two_inputs(in_folder):
    (in_folder / "explained_two.py").write_text(
        "import torch\n"
        "class Two(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.weight = torch.nn.Parameter(torch.ones(4, 8, 8))\n"
        "    def forward(self, x, y):\n"
        "        z = torch.einsum('bgi,goi->bgo', x.view(-1, 4, 8), self.weight).flatten(1)\n"
        "        return z @ y\n"
        "def build():\n"
        "    return Two()\n",
        encoding="utf-8",
    )


@pytest.mark.parametrize(
    "inputs", [["--input", "5x32", "--input", "32x7"], ["--input", "5x32", "32x7"]]
)
def test_several_inputs_are_several_inputs(inputs, of_two_inputs, capsys):
    assert main.main(["explain", "explained_two:build", "--no-time", *inputs]) == 0
    assert "(4,8,8,1)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["5x32"], "missing 1 required positional argument: 'y'"),
        (["5x33", "32x7"], "165"),  # numbers: torch's versions have words of their own
        (["5x32", "31x7"], "[31, 7]"),
    ],
)
def test_a_wrong_input_is_reported_in_a_sentence(inputs, message, of_two_inputs, capsys, caplog):
    arguments = ["explain", "explained_two:build", "--input", *inputs]
    assert main.main(arguments) == 2
    lines = [
        line for line in capsys.readouterr().err.splitlines() if "which runs its code" not in line
    ]
    assert len(lines) == 1
    assert lines[0].startswith(f"ksopt: explained_two:build: the model, called with {inputs[0]}")
    assert message in lines[0]
    assert lines[0].endswith("(--traceback shows where)")
    assert "torch._subclasses.fake_tensor" not in {record.name for record in caplog.records}
    with pytest.raises(InvalidInputError) as caught:
        main.main([*arguments, "--traceback"])
    assert caught.value.__cause__ is not None


def test_the_reports_of_a_compile_are_collected(compiled_by_eager):
    layer, x = torch.compile(nn.Conv1d(8, 8, 1, groups=2), backend="ksopt"), torch.ones(3, 8, 5)
    with collected() as outer, collected() as inner:
        pass
    with collected() as outer:
        with collected() as inner:
            layer(x)
        layer(torch.ones(3, 8, 6))  # recompiled
    assert len(inner) == 1
    assert len(outer) == 2
    assert outer[0] is inner[0]
    assert [str(site.chain) for site in outer[0].sites] == ["(2,4,4,1)"]


def test_deciding_is_no_part_of_the_pass(monkeypatch):
    def slowly(site, device, tune):
        time.sleep(0.3)
        return Decision(True, "It was measured.")

    monkeypatch.setattr(backend, "decide", slowly)
    explanation = ksopt.explain(nn.Conv1d(8, 8, 1, groups=2), torch.ones(3, 8, 5))
    assert explanation.report.deciding_s >= 0.3
    assert 0 < explanation.report.pass_s < 0.3
    # As long as it took: on a busy machine it sleeps longer.
    assert (
        f", and deciding what is faster {explanation.report.deciding_s:.1f} s."
        in explanation.summary()
    )
    assert explanation.to_json()["deciding_s"] == explanation.report.deciding_s
