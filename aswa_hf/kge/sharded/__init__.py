"""Entity tables that do not fit one process: rows spread over processes, with the same results as on one."""

from aswa_hf.kge.sharded.model import ShardedKGE, build_sharded, load_sharded, shard_entities
from aswa_hf.kge.sharded.sampling import BalancedBatches
from aswa_hf.kge.sharded.table import EntityShard

__all__ = ["BalancedBatches", "EntityShard", "ShardedKGE", "build_sharded", "load_sharded", "shard_entities"]
