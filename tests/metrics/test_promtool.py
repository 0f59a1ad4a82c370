"""Prometheus's own tool accepts what a server tells and the alert rules, and each rule fires when
it has to. Debian's package `prometheus` has the tool; without it these tests are skipped."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

import kvstore
from kvstore.remote.server.app import exposition
from tests.metrics.test_collectors import MONITORING

ALERTS: Final = MONITORING / "alerts.yml"

pytestmark = pytest.mark.skipif(not shutil.which("promtool"), reason="promtool is not installed")


def promtool(*arguments: str | Path, stdin: bytes = b"") -> str:
    """What the tool says. It must have found nothing."""
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


def test_what_a_server_tells_is_accepted(tmp_path: Path) -> None:
    """The tool says nothing unless a name, a unit or a help is against Prometheus's advice."""
    with kvstore.open(tmp_path / "store") as store:
        store.put(b"k", b"v", durability="sync")
        store.hold('a "hold" with \\ in it')
        store.feed("audit", start="now").close()
        assert promtool("check", "metrics", stdin=exposition(store)) == ""


def test_the_tool_finds_what_is_wrong() -> None:
    with pytest.raises(AssertionError, match="counter metrics should have"):
        promtool("check", "metrics", stdin=b"# HELP a Counts.\n# TYPE a counter\na 1\n")


def test_the_rules_are_accepted() -> None:
    said = promtool("check", "rules", "--lint=all", "--lint-fatal", ALERTS)
    assert f"{len(_fires())} rules found" in said


HISTOGRAM: Final = 'kvstore_fsync_seconds_bucket{le="%s"}'


def _fires() -> dict[str, tuple[dict[str, str], dict[str, str], str]]:
    """For each alert the series by which it fires, those by which it does not, in values for each
    minute, and after how long it has fired."""
    slow = {
        HISTOGRAM % "0.1": "0+98x60",
        HISTOGRAM % "0.5": "0+100x60",
        HISTOGRAM % "+Inf": "0+100x60",
    }
    fast = {HISTOGRAM % "0.1": "0+100x60", **dict.fromkeys([*slow][1:], "0+100x60")}

    def over(series: str, high: str, low: str, when: str) -> Any:
        return {series: f"{high}+0x2000"}, {series: f"{low}+0x2000"}, when

    def counts(series: str) -> Any:
        return {series: "0x7 1x20"}, {series: "7x30"}, "10m"

    week = 7 * 86400
    behind = 'kvstore_backup_behind_seconds{backup="b"}'
    proof = 'kvstore_backup_proof_age_seconds{backup="b"}'
    return {
        "KvstoreUnhealthy": over("kvstore_healthy", "0", "1", "15m"),
        "KvstoreWritesStopped": over("kvstore_writes_stopped", "1", "0", "15m"),
        "KvstoreWriteStops": counts("kvstore_write_stops_total"),
        "KvstoreNotDurable": over("kvstore_not_durable_seconds", "61", "59", "15m"),
        "KvstoreSlowFsyncs": (slow, fast, "30m"),
        "KvstoreHoldLost": over("kvstore_lost_holds", "1", "0", "15m"),
        "KvstoreFeedLags": over('kvstore_feed_lag_seconds{feed="f"}', "3601", "3599", "15m"),
        "KvstoreBackupBehind": over(behind, "3601", "3599", "15m"),
        "KvstoreBackupUnproven": over(proof, f"{week + 1}", f"{week - 1}", "2h"),
        "KvstoreBackupNeverProven": (
            {behind: "0x2000"},
            {behind: "0x2000", proof: "60+60x2000"},
            "25h",
        ),
        "KvstoreHistoryKept": over(
            'kvstore_oldest_claim_seconds{kind="feed"}', f"{week + 1}", f"{week - 1}", "2h"
        ),
        "KvstoreBackgroundFailures": counts('kvstore_background_failures_total{work="gc"}'),
        "KvstoreImportStays": over('kvstore_imports{state="adding"}', "1", "0", "25h"),
        "KvstorePushesPending": over('kvstore_pushes_pending{pushes="p"}', "1", "0", "2h"),
        "KvstoreConflicts": (
            {"kvstore_conflicts_total": "0+2x60", "kvstore_commits_total": "0+10x60"},
            {"kvstore_conflicts_total": "0+1x60", "kvstore_commits_total": "0+20x60"},
            "30m",
        ),
    }


def test_each_alert_fires_when_it_has_to(tmp_path: Path) -> None:
    told = re.findall(
        r"alert: (\w+)\n.*\n.*\n +labels: {severity: (\w+)}\n +annotations: {summary: \"(.*)\"}",
        ALERTS.read_text(encoding="utf-8"),
    )
    cases = _fires()
    assert [name for name, *_ in told] == [*cases]
    tests = []
    for name, severity, summary in told:
        bad, good, when = cases[name]
        for series, fires in ((bad, True), (good, False)):
            labels = dict(re.findall(r'(\w+)="(\w+)"', next(iter(series))))
            labels.pop("le", None)
            alert = {
                "exp_labels": {"severity": severity, **labels},
                "exp_annotations": {"summary": summary},
            }
            expected = {"exp_alerts": [alert] if fires else []}
            tests.append(
                {
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "alert_rule_test": [{"eval_time": when, "alertname": name, **expected}],
                }
            )
    told_file = {"rule_files": [str(ALERTS)], "evaluation_interval": "5m", "tests": tests}
    file = tmp_path / "alerts.json"  # which YAML includes
    file.write_text(json.dumps(told_file))
    assert "SUCCESS" in promtool("test", "rules", file)
