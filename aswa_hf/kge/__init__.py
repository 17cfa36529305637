"""Knowledge-graph embeddings as Hugging Face models: data, training, ranking, prediction, queries."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, AutoModel

from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.modeling_kge import RESCAL, ComplEx, DistMult, Keci, KGEModel, QMult, TuckER
from aswa_hf.kge.predict import LinkPredictor
from aswa_hf.kge.queries.answering import answer_query
from aswa_hf.kge.queries.language import And, Hop, Or, Query
from aswa_hf.kge.ranking import evaluate_link_prediction
from aswa_hf.kge.vocab import KGVocab

if TYPE_CHECKING:
    from aswa_hf.kge.data import KnowledgeGraph, load_kg
    from aswa_hf.kge.queries.ranking import evaluate_queries
    from aswa_hf.kge.queries.sampling import generate_queries, load_queries, save_queries
    from aswa_hf.kge.training import KGETrainer, paper_arguments

# Imported on first access: predictions need neither the Trainer nor `datasets`, which take seconds to import.
_MODULES = {
    **dict.fromkeys(("KnowledgeGraph", "load_kg"), "data"),
    "evaluate_queries": "queries.ranking",
    **dict.fromkeys(("generate_queries", "load_queries", "save_queries"), "queries.sampling"),
    **dict.fromkeys(("KGETrainer", "paper_arguments"), "training"),
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'aswa_hf.kge' has no attribute {name!r}")
    return getattr(import_module(f"aswa_hf.kge.{_MODULES[name]}"), name)


AutoConfig.register(KGEConfig.model_type, KGEConfig)
AutoModel.register(KGEConfig, KGEModel)
KGEConfig.register_for_auto_class()
for _model in (KGEModel, DistMult, ComplEx, QMult, Keci, RESCAL, TuckER):
    _model.register_for_auto_class("AutoModel")

__all__ = [
    "And",
    "ComplEx",
    "DistMult",
    "Hop",
    "KGEConfig",
    "KGEModel",
    "KGETrainer",
    "KGVocab",
    "Keci",
    "KnowledgeGraph",
    "LinkPredictor",
    "Or",
    "QMult",
    "Query",
    "RESCAL",
    "TuckER",
    "answer_query",
    "evaluate_link_prediction",
    "evaluate_queries",
    "generate_queries",
    "load_kg",
    "load_queries",
    "paper_arguments",
    "save_queries",
]
