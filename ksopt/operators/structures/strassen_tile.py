"""Strassen-Tile as a structured operator: tiles are encoded, multiplied entrywise and decoded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from ksopt.errors import InvalidInputError
from ksopt.operators.base import Fit, StructuredOperator
from ksopt.operators.structure import Structure, fields_of
from ksopt.patterns.pattern import bytes_per_element

if TYPE_CHECKING:
    from torch import Tensor

TILES = (2, 4)
"""The sides of tiles. With 8, the encoders alone cost as much as a layer of 500 features."""


@dataclass(frozen=True)
class StrassenTile(StructuredOperator):
    """Y = X Wᵀ by tiles of t rows and t features, each product of two tiles by r multiplications.

    With X and Y cut into t x t tiles, and V [r, out/t, in/t] in place of the matrix,

        Y_no = D (sum_i V_oi * (E X_ni)),

    where E [r, t²] encodes a tile and D [t², r] decodes one. With Strassen's E and D, r = 7 for
    t = 2 and 49 for t = 4, it is the dense product, and V, the encoded matrix, has r/t² times its
    weights: more than the dense layer. Fewer multiplications give an approximation, in which the t
    rows of a tile affect each other's results. Rows are padded with zeros to whole tiles.

    Source: Ailon, Bercovich, Uffenheimer and Weinstein 2025 (arXiv 2503.12211).

    Raises:
        InvalidInputError: The tile's side is not 2 or 4 or does not divide both sizes, or there are
            more multiplications than Strassen's algorithm needs.

    Example:
        >>> exact, half = StrassenTile(64, 64, 2, 7), StrassenTile(64, 64, 4, 8)
        >>> str(exact), round(exact.nnz / 64**2, 2), exact.flops(64) / (2 * 64**3)
        ('strassen-tile(64x64,2,7)', 1.76, 1.09375)
        >>> half.parameter_shapes(), half.nnz / 64**2
        ([(16, 8), (8, 16, 16), (8, 16)], 0.5625)
    """

    in_features: int
    out_features: int
    tile: int
    products: int

    def __post_init__(self) -> None:
        if self.tile not in TILES or gcd(self.in_features, self.out_features) % self.tile:
            raise InvalidInputError(f"{self}: the tile can be 2 or 4, and must divide both sizes")
        most = {2: 7, 4: 49}[self.tile]
        if not 1 <= self.products <= most:
            raise InvalidInputError(
                f"{self}: a product of {self.tile} x {self.tile} tiles takes 1 to {most} "
                f"multiplications, {most} where it is exact"
            )

    def __str__(self) -> str:
        size = f"{self.in_features}x{self.out_features}"
        return f"strassen-tile({size},{self.tile},{self.products})"

    @property
    def nnz(self) -> int:
        """The weights of V, D and E."""
        t2 = self.tile**2
        return self.products * (self.in_features * self.out_features // t2 + 2 * t2)

    @property
    def rows_together(self) -> int:
        """The rows of a tile."""
        return self.tile

    def parameter_shapes(self) -> Sequence[tuple[int, ...]]:
        """The shapes of D, V and E."""
        r, t = self.products, self.tile
        return [(t * t, r), (r, self.out_features // t, self.in_features // t), (r, t * t)]

    def bind(self, weights: Sequence[Tensor], layout: str) -> Callable[[Tensor], Tensor]:
        """The product in three steps: by E, by V as r batched products, and by D."""
        from ksopt.operators.strassen_product import bind

        return bind(self.tile, weights, layout)

    def reference(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        """The product in plain einsums, without the layouts of the fast one."""
        from ksopt.operators.strassen_product import reference

        return reference(self.tile, x, weights)

    def draw(self, weights: Sequence[Tensor], gain: float) -> None:
        """Draw a matrix as `torch.nn.Linear` does, and fit the weights to it: Strassen's terms."""
        import torch

        from ksopt.nn import init

        first = weights[0]
        if first.is_meta:
            return  # the meta device has no values
        matrix = torch.empty(self.out_features, self.in_features, device=first.device)
        init.product_uniform_([matrix], [self.in_features], gain)
        with torch.no_grad():
            for own, fitted in zip(weights, self.nearest(matrix).weights, strict=True):
                own.copy_(fitted)

    def bytes_moved(self, batch: int, dtype: str) -> int:
        """The bytes of the three products; encoded x and y are written and read."""
        tiles = -(-batch // self.tile)
        features = self.in_features + self.out_features
        encoded = self.products * tiles * (features // self.tile)
        return (batch * features + 2 * encoded + self.nnz) * bytes_per_element(dtype)

    def flops(self, batch: int) -> int:
        """The flops of encoding, multiplying with accumulation, and decoding, for whole tiles."""
        rows, t = -(-batch // self.tile), self.tile
        inputs, outputs = self.in_features // t, self.out_features // t
        return 2 * rows * self.products * (t * t * (inputs + outputs) + inputs * outputs)

    def nearest(self, matrix: Tensor) -> Fit:
        """A joint fit of V, D and E by least squares; exact with all of Strassen's products.

        The relative error is that of the map of t rows, ||M - I ⊗ W|| / ||I ⊗ W|| in the Frobenius
        norm: if rows are independent it is the error of W, and always the root mean square error of
        the outputs for white inputs.
        """
        import torch

        from ksopt.operators import tile_products

        t, r = self.tile, self.products
        cut = matrix.double().unflatten(0, (-1, t)).unflatten(2, (-1, t))  # [O, t(c), I, t(b)]
        tiles = cut.permute(0, 2, 3, 1).flatten(2).flatten(0, 1)  # of Wᵀ: [O I, t²]
        basis, metric = torch.linalg.qr(tiles)
        terms = tile_products.nearest(metric, t, r)
        encoded = basis @ terms.weight.to(basis.device)  # [O I, r]
        v = encoded.T.unflatten(1, (self.out_features // t, self.in_features // t))
        weights = (terms.output, v, terms.input.T)
        like = [one.to(matrix.device, matrix.dtype).contiguous() for one in weights]
        return Fit(like, terms.relative_error)


def parse(text: str) -> StrassenTile:
    """The operator of a text."""
    form = "strassen-tile(INxOUT,TILE,PRODUCTS)"
    size, (tile, products) = fields_of(text, form)
    return StrassenTile(size.in_features, size.out_features, tile, products)


def candidates(in_features: int, out_features: int) -> Iterator[StrassenTile]:
    """The tiles and numbers of multiplications that have fewer weights than the dense matrix.

    Example:
        >>> [(one.tile, one.products) for one in candidates(64, 64)][:5]
        [(2, 1), (2, 2), (2, 3), (4, 1), (4, 2)]
    """
    for tile in TILES:
        if gcd(in_features, out_features) % tile == 0:
            for products in range(1, tile**2):
                yield StrassenTile(in_features, out_features, tile, products)


STRUCTURE = Structure("strassen-tile", parse, candidates, order=40)
