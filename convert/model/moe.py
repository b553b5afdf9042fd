"""Settings of mixtures of experts: the router, the experts and the shared expert."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class RouterConfig:
    """How a token's experts are chosen and weighted.

    Attributes:
        num_experts: X.
        experts_per_token: k.
        score: "softmax" over all experts, or "sigmoid" of each logit.
        score_after: whether the k largest logits are chosen first and the softmax is over these.
        normalize: whether the chosen weights are divided by their sum.
        scale: factor of the weights.
        groups: consecutive groups of experts; a group's score is the sum of its best two.
        groups_per_token: groups whose experts may be chosen.
        choice_bias: whether a weight is added to the scores for the choice alone.
        bias: whether the logits have a bias.
    """

    num_experts: int
    experts_per_token: int
    score: str = "softmax"
    score_after: bool = False
    normalize: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    choice_bias: bool = False
    bias: bool = False


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """A mixture of experts in place of a layer's MLP.

    Attributes:
        router: the choice of experts.
        intermediate_size: F of an expert.
        shared_intermediate_size: F of the shared expert, which sees every token; 0: there is none.
        shared_gate: whether its output is multiplied by sigmoid(w · x).
        bias: whether the experts' projections have biases.
    """

    router: RouterConfig
    intermediate_size: int
    shared_intermediate_size: int = 0
    shared_gate: bool = False
    bias: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions of its tensors, by their names in rows."""
        return {
            "X": self.router.num_experts,
            "EF": self.intermediate_size,
            "SF": self.shared_intermediate_size,
        }

    @property
    def flags(self) -> frozenset[str]:
        """The flags of rows that not every mixture has."""
        flags = {
            "router bias": self.router.bias,
            "choice bias": self.router.choice_bias,
            "experts bias": self.bias,
            "shared gate": self.shared_gate,
        }
        return frozenset(flag for flag, raised in flags.items() if raised)
