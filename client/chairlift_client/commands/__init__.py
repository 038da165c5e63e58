"""One module per command; heavy imports happen inside, so that probes and --help start fast."""
