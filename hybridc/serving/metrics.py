"""What Prometheus is told, beside KServe's own `request_predict_seconds`."""

from __future__ import annotations

from kserve.metrics import PREDICT_HIST_TIME as PREDICT_HIST_TIME
from prometheus_client import Counter, Gauge, Histogram

WAITING = Gauge("hybridc_requests_waiting", "requests in the queue of a model", ["model_name"])
REQUESTS_PER_RUN = Histogram(
    "hybridc_requests_per_run",
    "requests that were joined to one run",
    ["model_name"],
    buckets=(1, 2, 4, 8, 16, 32, 64, 128),
)
REFUSED = Counter(
    "hybridc_requests_refused", "requests that were answered with an error", ["protocol", "status"]
)
MEMORY = Gauge("hybridc_memory_bytes", "memory that a session holds on a device", ["model_name", "device"])
TOKENS = Counter(
    "hybridc_tokens", "tokens that a decoder has read of prompts, or generated", ["model_name", "kind"]
)
