"""Knowledge-graph embeddings as Hugging Face models: data, training, ranking, prediction."""

from transformers import AutoConfig, AutoModel

from aswa_hf.kge.configuration_kge import KGEConfig
from aswa_hf.kge.data import KGVocab, KnowledgeGraph, load_kg
from aswa_hf.kge.modeling_kge import RESCAL, ComplEx, DistMult, Keci, KGEModel, QMult, TuckER
from aswa_hf.kge.predict import LinkPredictor
from aswa_hf.kge.ranking import evaluate_link_prediction
from aswa_hf.kge.training import KGETrainer, paper_arguments

AutoConfig.register(KGEConfig.model_type, KGEConfig)
AutoModel.register(KGEConfig, KGEModel)
KGEConfig.register_for_auto_class()
for _model in (KGEModel, DistMult, ComplEx, QMult, Keci, RESCAL, TuckER):
    _model.register_for_auto_class("AutoModel")

__all__ = [
    "ComplEx",
    "DistMult",
    "KGEConfig",
    "KGEModel",
    "KGETrainer",
    "KGVocab",
    "Keci",
    "KnowledgeGraph",
    "LinkPredictor",
    "QMult",
    "RESCAL",
    "TuckER",
    "evaluate_link_prediction",
    "load_kg",
    "paper_arguments",
]
