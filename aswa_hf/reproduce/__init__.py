"""The paper's tables: the runs they need, training them, and their results beside the paper's figures."""
