"""Figures of a server in Prometheus' text format (version 0.0.4).

Labels are the reason of an end, a route and a status, all of which the server names itself: no prompt, key, user or
adapter stands in one.
"""

import bisect
import collections
from collections.abc import Mapping

#: Upper bounds of the histograms' buckets, in seconds.
BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

#: Seconds over which a rate is told.
WINDOW = 10.0


class Histogram:
    """Times in buckets."""

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total = 0.0

    def add(self, seconds: float) -> None:
        """Count a time.

        Args:
            seconds: the time.
        """
        self.counts[bisect.bisect_left(BUCKETS, seconds)] += 1
        self.total += seconds

    def lines(self, name: str, meaning: str) -> list[str]:
        """Its lines.

        Args:
            name: of the figure.
            meaning: in a few words.
        """
        found, sum_so_far = _head(name, meaning, "histogram"), 0
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self.counts, strict=True):
            sum_so_far += count
            found.append(f'{name}_bucket{{le="{bound}"}} {sum_so_far}')
        return [*found, f"{name}_sum {self.total:.6f}", f"{name}_count {sum_so_far}"]


class Metrics:
    """Figures of a server's work.

    Attributes:
        prompt: tokens of prompts that came in.
        generated: tokens of answers.
        finished: answers that ended, by the reason.
        responses: responses, by route and status.
        first_token: from a request to the first token of its answers.
        answered: from a request to the end of its answers.
    """

    def __init__(self) -> None:
        self.prompt = self.generated = 0
        self.finished: collections.Counter[str] = collections.Counter()
        self.responses: collections.Counter[tuple[str, int]] = collections.Counter()
        self.first_token, self.answered = Histogram(), Histogram()
        self._steps: collections.deque[tuple[float, int]] = collections.deque([(0.0, 0)])

    def stepped(self, now: float) -> None:
        """Note the tokens so far.

        Args:
            now: seconds of a clock.
        """
        self._steps.append((now, self.generated))
        while len(self._steps) > 1 and self._steps[1][0] < now - WINDOW:
            self._steps.popleft()

    def rate(self, now: float) -> float:
        """Tokens of answers a second, over the last `WINDOW` seconds.

        Args:
            now: seconds of the same clock.
        """
        before = [count for moment, count in list(self._steps) if moment <= now - WINDOW]
        return (self.generated - (before[-1] if before else 0)) / WINDOW

    def text(self, gauges: Mapping[str, tuple[str, float]]) -> str:
        """All figures.

        Args:
            gauges: name → its meaning, and its value now.
        """
        lines = []
        for name, (meaning, value) in gauges.items():
            lines += [*_head(f"fastjax_{name}", meaning, "gauge"), f"fastjax_{name} {value:g}"]
        for name, meaning, value in (
            ("fastjax_prompt_tokens_total", "tokens of prompts that came in", self.prompt),
            ("fastjax_generated_tokens_total", "tokens of answers", self.generated),
        ):
            lines += [*_head(name, meaning, "counter"), f"{name} {value}"]
        lines += _head("fastjax_answers_total", "answers that ended, by the reason", "counter")
        lines += [f'fastjax_answers_total{{reason="{reason}"}} {count}' for reason, count in _now(self.finished)]
        lines += _head("fastjax_responses_total", "responses, by route and status", "counter")
        for (route, status), count in _now(self.responses):
            lines.append(f'fastjax_responses_total{{route="{route}",status="{status}"}} {count}')
        lines += self.first_token.lines("fastjax_time_to_first_token_seconds", "from a request to its first token")
        lines += self.answered.lines("fastjax_request_seconds", "from a request to the end of its answers")
        return "\n".join(lines) + "\n"


def _now(counter: collections.Counter) -> list:
    """The counts at this moment, sorted; another thread may count on."""
    return sorted(dict(counter).items())


def _head(name: str, meaning: str, kind: str) -> list[str]:
    return [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
