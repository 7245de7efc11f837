"""What a training phase minimises: a picklable record that becomes the loss of Megatron's schedule on a slot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from nereus.rl.batch import Batch
from nereus.rl.losses import Denominators, PolicySettings, ValueSettings, policy_loss, sft_loss, value_loss


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """The loss, its settings and the global denominators of the mini-batch."""

    kind: Literal["policy", "value", "sft"]
    denominators: Denominators
    policy: PolicySettings | None = None
    value: ValueSettings | None = None

    def loss(self, outputs: dict[str, Tensor], batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        """(scalar to minimise, summable metrics) of a micro-batch; columns as `nereus.runtime.phases` fills them."""
        columns = batch.columns
        if self.kind == "sft":
            return sft_loss(outputs["logp"], batch.mask, self.denominators)
        if self.kind == "value":
            if self.value is None:
                raise ValueError("a value objective needs ValueSettings")
            return value_loss(
                outputs["values"], columns["values"], columns["returns"], batch.mask, self.value, self.denominators
            )
        if self.policy is None:
            raise ValueError("a policy objective needs PolicySettings")
        return policy_loss(
            outputs["logp"],
            outputs["entropy"],
            columns["old_logp"],
            columns["advantages"],
            batch.mask,
            self.policy,
            self.denominators,
        )
