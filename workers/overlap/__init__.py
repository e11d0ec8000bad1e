"""AllReduce overlapped with compute: schedule, measured plan, and the models that run by it."""
