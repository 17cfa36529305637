"""Knowledge-graph embeddings as Hugging Face models: data, training, ranking, prediction, queries."""

from transformers import AutoConfig, AutoModel

from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.data import KGVocab, KnowledgeGraph, load_kg
from aswa_hf.kge.modeling_kge import RESCAL, ComplEx, DistMult, Keci, KGEModel, QMult, TuckER
from aswa_hf.kge.predict import LinkPredictor
from aswa_hf.kge.queries.answering import answer_query
from aswa_hf.kge.queries.language import And, Hop, Or, Query
from aswa_hf.kge.queries.ranking import evaluate_queries
from aswa_hf.kge.queries.sampling import generate_queries, load_queries, save_queries
from aswa_hf.kge.ranking import evaluate_link_prediction
from aswa_hf.kge.training import KGETrainer, paper_arguments

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
