"""What the scripts of perf/ share: workloads, peers, machine facts, statistics over rounds."""
