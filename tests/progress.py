"""Progress of a test run: how far, how long still, and each failure when it happens.

A line at least every `INTERVAL` seconds (on a terminal one that is written over). The estimate weighs modules by
durations.json and scales them by how fast this run has been; `--write-durations` writes that file anew.
"""

import collections
import json
import sys
import time

import pytest

from tests import tiers

#: Seconds between two lines in a log.
INTERVAL = 20.0


def add_options(parser):
    parser.addoption("--write-durations", action="store_true", help="keep this run's seconds in tests/durations.json")


class Progress:
    """Reports of the process that the others report to."""

    def __init__(self, config):
        self.config, self.run = config, tiers.run(config)
        self.expected: dict[str, float] = {}
        self.spent: dict[str, float] = collections.defaultdict(float)
        self.done, self.failed, self.begun, self.said = set(), [], time.monotonic(), 0.0
        self.terminal = sys.stdout.isatty()

    def _module(self, nodeid: str) -> str:
        return nodeid.partition("::")[0].removeprefix("tests/")

    def _expect(self, nodeids) -> None:
        """Spread each module's seconds over its tests; a module that is not known takes a second."""
        known = tiers.durations()
        modules = collections.Counter(self._module(nodeid) for nodeid in nodeids)
        for nodeid in nodeids:
            module = self._module(nodeid)
            self.expected[nodeid] = known.get(module, {}).get(self.run, 1.0) / modules[module] + 0.002

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node, ids):
        if not self.expected:
            self._expect(ids)
            self.begun = time.monotonic()

    def pytest_collection_finish(self, session):
        if session.items:
            self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report, config):
        """No letters: lines say how far it is, and failures have one of their own."""
        if report.when == "call" or report.outcome == "skipped":
            return report.outcome, "", report.outcome.upper()
        return {"failed": "error"}.get(report.outcome, ""), "", "ERROR"

    def pytest_runtest_logreport(self, report):
        self.spent[self._module(report.nodeid)] += report.duration
        if report.failed:
            self.failed.append(report.nodeid)
            self._write(f"FAILED {report.nodeid}: {_last_line(report)}", lasting=True)
        if report.when == "teardown":
            self.done.add(report.nodeid)
            if time.monotonic() - self.said > (1.0 if self.terminal else INTERVAL):
                self.said = time.monotonic()
                self._write(self._line())

    def pytest_terminal_summary(self, terminalreporter):
        """Why tests were skipped, a line a reason: skipped is not passed."""
        reasons = collections.Counter(report.longrepr[2] for report in terminalreporter.stats.get("skipped", ()))
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count} skipped: {reason.removeprefix('Skipped: ')}")

    def _line(self) -> str:
        gone, total = time.monotonic() - self.begun, sum(self.expected.values())
        part = min(sum(self.expected.get(nodeid, 0.0) for nodeid in self.done) / max(total, 1e-9), 1.0)
        left = f"about {_clock(gone / part - gone)} left" if part > 0.02 else ""
        failed = f"{len(self.failed)} FAILED" if self.failed else ""
        tests = f"{len(self.done)} of {len(self.expected)} tests"
        return ", ".join(filter(None, (f"{part:4.0%}", tests, f"{_clock(gone)} gone", left, failed)))

    def _write(self, text: str, lasting: bool = False) -> None:
        if self.terminal:
            text = "\r\033[2K" + text + ("\n" if lasting else "")
        else:
            text += "\n"
        sys.stdout.write(text)
        sys.stdout.flush()

    def pytest_sessionfinish(self, session):
        if self.terminal:
            self._write("")
        if self.config.getoption("write_durations"):
            known = tiers.durations()
            for module, seconds in self.spent.items():
                known.setdefault(module, {})[self.run] = round(seconds, 1)
            known = {module: known[module] for module in sorted(known) if (tiers.TESTS / module).exists()}
            tiers.DURATIONS.write_text(_table(known))


def _table(known) -> str:
    rows = ",\n".join(f"  {json.dumps(module)}: {json.dumps(row)}" for module, row in known.items())
    return "{\n" + rows + "\n}\n"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def _last_line(report) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return (crash.message if crash else str(report.longrepr)).strip().partition("\n")[0][:200]
