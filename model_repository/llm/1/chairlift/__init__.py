"""The Chairlift engine: continuous batching over a paged KV cache; knows nothing of the server."""

import os

# GNU OpenMP's threads spin at every barrier before they sleep, by default so long that a core which
# also serves clients is lost to it: with two threads on two busy cores a step of 16 rows took over
# 4 s, with 20,000 turns 0.70 s, with 2,000 turns 0.18 s. It is read when torch loads the runtime.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
