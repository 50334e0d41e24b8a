"""vLLM's `lora.request`."""

from torchweave.engine.lora_request import LoRARequest as LoRARequest
