"""Loss curve of this trainer and of the Trainer of transformers.

Both have the same weights, batches and learning rates.
"""

from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

from tests.trainer.tiny_models import config_of, micro_batches, training_of
from trainer.data.dataset import TokenDataset
from trainer.distributed.optimizer import learning_rate

pytestmark = pytest.mark.system

STEPS = 12


def _losses_of_transformers(
    training: Any, batches: list[dict[str, torch.Tensor]], config: Any, out: str
) -> list[float]:
    losses: list[float] = []

    class SameRates(TrainerCallback):
        def on_step_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            # The Trainer's own warm-up begins with a step at rate 0.
            for group in kwargs["optimizer"].param_groups:
                group["lr"] = learning_rate(config, state.global_step)

        def on_log(
            self,
            args: Any,
            state: Any,
            control: Any,
            logs: dict[str, float],
            **kwargs: Any,
        ) -> None:
            if "loss" in logs:
                losses.append(logs["loss"])

    class TrainerInOrder(Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(
                self.train_dataset, batch_size=None, shuffle=False
            )

    model = BertForMaskedLM(training.module.model.config)
    model.load_state_dict(training.module.model.state_dict())
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=STEPS,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        optim="adamw_torch_fused",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        per_device_train_batch_size=1,
    )
    transformers_trainer = TrainerInOrder(
        model=model, args=arguments, train_dataset=batches, callbacks=[SameRates()]
    )
    transformers_trainer.train()
    return losses


def test_loss_curve_matches_transformers_trainer(patterned_dataset, tmp_path):
    dataset = TokenDataset.open(patterned_dataset)
    config = config_of(
        layout="padded",
        micro_batch_size=16,
        global_batch_size=16,
        max_steps=STEPS,
        warmup_steps=4,
        learning_rate=5e-3,
        max_grad_norm=1.0,
    )
    training = training_of(config, dataset)
    batches = micro_batches(dataset, config, steps=STEPS)
    transformers_batches = [
        {
            "input_ids": batch.wide_ids_BS(),
            "attention_mask": batch.attention_BS(),
            "labels": batch.labels_BS(),
        }
        for batch in batches
    ]
    expected = _losses_of_transformers(
        training, transformers_batches, config, str(tmp_path)
    )
    losses = [
        float(training.step.run([batch], learning_rate(config, step)).loss)
        for step, batch in enumerate(batches)
    ]
    assert len(expected) == STEPS
    # The Trainer logs four digits.
    assert losses == pytest.approx(expected, rel=1e-4, abs=6e-5)
    assert losses[-1] < 0.95 * losses[0]
