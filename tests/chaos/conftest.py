"""One line on all rounds, whichever worker played them."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [
        report
        for kind in ("passed", "failed")
        for report in terminalreporter.stats.get(kind, ())
        if report.when == "call" and "victim" in dict(report.user_properties)
    ]
    if not reports:
        return
    facts = [dict(report.user_properties) for report in reports]
    victims = Counter(str(some["victim"]) for some in facts)
    total = {name: sum(int(some.get(name, 0)) for some in facts) for name in ("lost", "orphans", "mismatches")}
    failed = sum(report.failed for report in reports)
    kills = ", ".join(f"{count} {name}" for name, count in victims.most_common())
    terminalreporter.write_line(
        f"chaos: {len(facts)} rounds, killed: {kills}; records lost {total['lost']}, orphans {total['orphans']}, "
        f"mismatches {total['mismatches']}, rounds failed {failed}"
    )
