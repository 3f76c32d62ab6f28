"""How the losses of tokens become the loss of a batch."""

from collections.abc import Sequence

AGGREGATIONS = (
    "token_mean",
    "seq_mean_token_mean",
    "seq_mean_token_sum",
    "seq_mean_token_sum_const",
)


def row_weights(
    rows_S: Sequence[int],
    weights_S: Sequence[float],
    aggregation: str,
    constant: float | None = None,
) -> list[float]:
    """The weight of a row of each sequence, given the sequences' numbers of rows and weights.

    Sequences without rows count nowhere. `constant` divides the sums of seq_mean_token_sum_const.
    """
    check_aggregation(aggregation, constant)
    shares = [weight if rows else 0.0 for weight, rows in zip(weights_S, rows_S, strict=True)]
    if not any(shares):
        raise ValueError("no token of the batch carries loss: every loss_mask or weight is empty")
    if aggregation == "token_mean":
        total = sum(share * rows for share, rows in zip(shares, rows_S, strict=True))
        return [share / total for share in shares]
    total = sum(shares)
    if aggregation == "seq_mean_token_mean":
        return [share / (total * max(1, rows)) for share, rows in zip(shares, rows_S, strict=True)]
    return [share / (total * (constant or 1.0)) for share in shares]


def check_aggregation(aggregation: str, constant: float | None) -> None:
    """Refuse an unknown name, and a constant that is missing or not read."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is not known; use one of {', '.join(AGGREGATIONS)}"
        )
    if (constant is not None) != (aggregation == "seq_mean_token_sum_const"):
        raise ValueError(
            f"constant={constant} with aggregation={aggregation!r}; seq_mean_token_sum_const "
            "needs one (the longest reply, say), the others read none"
        )
    if constant is not None and not constant > 0:
        raise ValueError(f"constant={constant} must be above 0")
