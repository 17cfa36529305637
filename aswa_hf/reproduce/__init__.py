"""The paper's tables: what they need to be run, running it, and showing it beside the paper's figures."""
