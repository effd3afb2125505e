"""Training that grows: learners, and engines that advance many of them."""

import os

# CUDA reads it when it starts: with its 8 queues, 16 streams wait for each other. So it stands where any part of the
# engine passes by. It has no effect if CUDA was used before the first import of the engine, or if the user has set it.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
