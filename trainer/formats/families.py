"""Architectures whose encoder takes packed sequences, and layouts of their layers.

No torch here.

A test compares the table with ``verify_packing`` for every masked-LM encoder of
transformers. The trainer itself verifies each model at its start, listed or not;
architectures that cannot be packed train with one sample per sequence and a dense MLM
head.
"""

from typing import Literal

LayerLayout = Literal["bert", "modernbert"]

_PACKED_ONLY = (
    "albert",
    "distilbert",
    "electra",
    "esm",
    "esmc",
    "eurobert",
    "gte",
    "ibert",
    "jina_embeddings_v3",
    "megatron-bert",
    "nomic_bert",
    "rembert",
    "roberta-prelayernorm",
    "roc_bert",
    "roformer",
    "squeezebert",
    "tapas",
    "xlm-roberta-xl",
)
"""Architectures whose layers have another layout than BERT's and ModernBERT's."""
_LIKE_BERT = ("bert", "camembert", "data2vec-text", "ernie", "roberta", "xlm-roberta")
"""Architectures whose layers have the names and order of BERT's."""
FAMILIES: dict[str, LayerLayout | None] = {
    **dict.fromkeys(_PACKED_ONLY),
    **dict.fromkeys(_LIKE_BERT, "bert"),
    "modernbert": "modernbert",
}
"""Layout of the layers, by transformers' model type; None for any other layout, whose
last layer cannot be sparse."""
