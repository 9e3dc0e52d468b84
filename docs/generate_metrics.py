"""Write docs/metrics.md from the catalogue in `stopguard.telemetry`.

python docs/generate_metrics.py            write the page again
python docs/generate_metrics.py --check    only say whether it is current
"""

from __future__ import annotations

import sys
from pathlib import Path

from stopguard.telemetry.catalogue import CATALOGUE, LATENCY_BOUNDS, PROBE_LAG_BOUNDS, TOKEN_BOUNDS, Label, Metric

PAGE = Path(__file__).with_name("metrics.md")

INTRODUCTION = """\
# Metrics

<!-- Written by docs/generate_metrics.py; change stopguard/telemetry/catalogue.py instead. -->

The admin port serves them at `/metrics`: in OpenMetrics, with exemplars that carry a `trace_id`, to a scraper that
asks for it, else in the Prometheus text format. Dashboards and alerts over them are in
[dashboards.md](dashboards.md).

- **States are read from the books** at the moment of the scrape (origin *books*), so that no gauge can drift from
  what it counts. **Latencies are observed** when the books of a stopped request close (origin *event*), from the
  instants in which its steps happened.
- **Nothing unknown is counted as zero.** A step without an instant is not observed. A stop without evidence is the
  outcome `unconfirmed`. A gauge that cannot be known (orphans of an engine without gauges) is absent.
- **Labels are closed sets.** `engine` is a configured name, `model` is listed by an engine or is `other`. No label
  comes from a request, a key, a tenant or an address, so no client can add a series.
- **Series exist at zero** from the start for each engine and its models (the first 64 pairs; others from their first
  request on), since `increase` cannot see a series that begins at one.
- Latencies within a machine come from one monotonic clock.
"""

AFTER = """
## Read them rightly

- *Is every stop a stop?* `stopguard_stops_total{outcome="unconfirmed"}` and `stopguard_leaks_total` stay flat, and
  the 99th percentile of `stopguard_stop_to_settled_seconds` is what you promise. A stop that never settles is in the
  first two only.
- **Waste** is counted where it can be seen. When StopGuard has to close the connection to an engine without a probe,
  what the engine computes after that is hidden: `stopguard_wasted_tokens` leaves such stops out, and
  `stopguard_tokens_total` has what came before the close.
- **GPU-seconds**: a wasted token costs the time of its step divided by the requests that shared the step. With a
  probe both are the engine's own; without one the step time is the pace of finished streams, and the number of
  requests is the books'.
- **Detection** needs to know when a client really left. A socket that was closed does not say when: of a client that
  is seen to leave only the storms of the reference engine know it.
- **An engine's own metrics cannot replace these.** vLLM's abort counter stays 0 (vllm-project/vllm#31503) and aborted
  requests are in no metric per request (vllm-project/vllm#55634); SGLang counts cancels by clients as successes
  (sgl-project/sglang#32456).
- Beside the metrics above the page has prometheus_client's `process_*` (memory, CPU, open files).
"""


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "\n## All of them\n\n| metric | type | labels | what it says |\n|---|---|---|---|\n"]
    parts += [_row(metric) for metric in CATALOGUE]
    parts.append("\n## Labels\n\n| label | values |\n|---|---|\n")
    labels: dict[tuple[str, tuple[str, ...]], Label] = {}
    for metric in CATALOGUE:
        for label in metric.labels:
            labels.setdefault((label.name, label.values), label)
    parts += [_label_row(label) for label in sorted(labels.values(), key=lambda label: (label.name, label.values))]
    parts.append("\n## Buckets\n\n| histograms | upper bounds |\n|---|---|\n")
    for what, bounds in (
        ("latencies (seconds)", LATENCY_BOUNDS),
        ("`stopguard_probe_lag_seconds`", PROBE_LAG_BOUNDS),
        ("`stopguard_wasted_tokens`", TOKEN_BOUNDS),
    ):
        parts.append(f"| {what} | {' '.join(f'{bound:g}' for bound in bounds)} |\n")
    return "".join([*parts, AFTER])


def _row(metric: Metric) -> str:
    labels = " ".join(f"`{label.name}`" for label in metric.labels) or "none"
    note = f" {metric.note}" if metric.note else ""
    return f"| `{metric.name}` | {metric.kind}, {metric.origin} | {labels} | {metric.help}{note} |\n"


def _label_row(label: Label) -> str:
    return f"| `{label.name}` | {' '.join(f'`{value}`' for value in label.values) or label.source} |\n"


def main() -> int:
    """Write or check the page; 1 when it is not current."""
    if "--check" in sys.argv[1:]:
        current = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page()
        print(f"{PAGE.name} is {'current' if current else 'out of date: run make docs'}")
        return int(not current)
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
