"""Multi-hop queries: their language, their answers by beam search, and benchmarks of them."""
