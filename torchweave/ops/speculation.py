"""Speculative decoding on the device: propose draft tokens, feed them in one step, keep those that the sampler draws as well.

A decode row feeds its last token and up to K drafts, which are guesses of the tokens that follow. The step draws a token after
each of them, by the sampler of all steps: noise is keyed by seed and position, so each draw is the token that a step of its own
would have drawn, provided that the drafts before it are right. So drafts are kept while they equal what was drawn, and no
distribution is corrected: a request has the same tokens with and without drafts.

    propose          drafts[R, K], num_drafts[R]      from each slot's history (prompt lookup)
    prepare_drafts   inputs of the model, of attention and of the sampler
    accept           the tokens to keep, into the slots, their histories and `out`

A draft model replaces `propose`. Its keys and values may lack positions: those of steps without drafts, and the last of a row
whose drafts were all kept.

    catch_up         inputs of its first forward: each row's tokens from the first missing one to the last token
    feed_draft       inputs of the forward that follows a draft
    note_computed    the positions that it computes in a step with prompts

Its drafts are drawn with the noise of the position they are for, so a draft is the token drawn there if both models agree.

A draft head computes a position from the model's hidden state there and the token after it (`token_shift` 1): its positions end
before the last token. Behind that it continues with its own hidden states, so accepted drafts are computed again by `catch_up`.

    next_tokens      the token after each token of a step with prompts

R rows, K drafts a row, Q = K + 1. The tokens of a row with n drafts are 1 + n consecutive ones, and rows follow each other:
attention takes them as it takes prompts. Logits and drawn tokens have a fixed place, `row * Q + offset`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchweave.ops.kernels.sampling.layout import DraftRows
from torchweave.ops.slot_fields import SAMPLED
from torchweave.ops.slot_state import NOT_EMITTED, SlotState, StepInputs, fill_slot_mapping

_ALIGNMENT = 32  # int32 elements: kernels are not compiled again for rows of a matrix at another alignment


@dataclass(frozen=True)
class DraftOptions:
    """The drafter: a draft model, or the tokens that followed the latest earlier occurrence of the last few tokens.

    Attributes:
        num_tokens: K, most drafts of a row.
        min_ngram, max_ngram: shortest and longest run of last tokens to look for; the longest one found decides.
        synthetic_acceptance: for benchmarks: keep each draft with this probability instead, if those before it are kept.
        from_model: a draft model or head proposes.
        token_shift: 1 for a head, whose position p takes token p + 1; 0 for a model.
    """

    num_tokens: int
    min_ngram: int = 2
    max_ngram: int = 5
    synthetic_acceptance: float | None = None
    from_model: bool = False
    token_shift: int = 0


class DraftBuffers:
    """Device tensors of steps with drafts, for up to `max_rows` rows of up to K drafts.

    drafts int32 [R * K]; num_drafts int32 [R]; matches int64 [R], zero between steps; query_start int32 [R + 1]; logits_index int64
    [R * Q]; entries int32 [R * Q]: its own index, or -1 where nothing is drawn; tokens int32 [R * Q]; out int32 [R * Q + R].
    For a draft model, model_tokens int32 [K, R] are its drafts, and model_entries int32 [K, R] their places in `sampled`, or -1;
    model_slots int32 [R] are the slots of a decode forward, or -1.
    `matches` is then 1 + the positions that the draft model has computed, negative for a row that has no drafts yet.
    `sampled` has a slot for each entry: the sampler's parameters, and the position before the token to draw.
    """

    def __init__(self, max_rows: int, options: DraftOptions, device: torch.device) -> None:
        query_len = options.num_tokens + 1
        self.options = options

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._drafts, self._num_drafts = zeros(max_rows * options.num_tokens), zeros(max_rows)
        self._matches, self._query_start = zeros(max_rows, torch.int64), zeros(max_rows + 1)
        self._logits_index, self._entries = zeros(max_rows * query_len, torch.int64), zeros(max_rows * query_len)
        self._tokens, self._out = zeros(max_rows * query_len), zeros(max_rows * (query_len + 1))
        model_size = (-(-max_rows // _ALIGNMENT) * _ALIGNMENT) if options.from_model else 0
        self._model_slots = zeros(model_size)
        self._model_tokens, self._model_entries = (
            zeros(options.num_tokens * model_size).view(options.num_tokens, model_size) for _ in range(2)
        )
        self.sampled = SlotState(max_rows * query_len, 1, device=device)

    def rows(self, rows: int, query_len: int = 0) -> DraftRows:
        """The tensors of a step of `rows` rows of `query_len` tokens, or 0: as many as they have room for."""
        query_len = query_len or self.options.num_tokens + 1
        entries, num_drafts = rows * query_len, rows * (query_len - 1)
        return DraftRows(
            query_len,
            self._drafts[:num_drafts],
            self._num_drafts[:rows],
            self._matches[:rows],
            self._query_start[: rows + 1],
            self._logits_index[:entries],
            self._entries[:entries],
            self._tokens[:entries],
            self._out[: entries + rows],
            self._model_tokens[: query_len - 1, :rows],
            self._model_entries[: query_len - 1, :rows],
            self._model_slots[:rows],
        )


def propose(state: SlotState, slots: Tensor, options: DraftOptions, rows: DraftRows) -> None:
    """Propose drafts for the rows `slots`, int32 [R]: `rows.drafts` and `rows.num_drafts`.

    A row has drafts for positions up to `draft_limit` of its slot. Where the text ends before the last draft, it continues with
    the text between both occurrences once more, as a repeating text does.
    """
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_propose

        launch_propose(state, slots, options.min_ngram, options.max_ngram, rows.matches)
        return  # `prepare_drafts` reads the drafts from the histories
    history, position, limit = (state.host_arrays[name] for name in ("history", "position", "draft_limit"))
    most = rows.query_len - 1
    drafts, num_drafts = rows.drafts.numpy().reshape(-1, most), rows.num_drafts.numpy()
    num_drafts[...] = 0
    for row, slot in enumerate(slots.tolist()):
        room = min(most, int(limit[slot] - position[slot])) if slot >= 0 else 0
        if room <= 0:
            continue
        text = history[slot, : position[slot] + 1]
        end = latest_match(text, options.min_ngram, options.max_ngram)
        if end is not None:
            drafts[row] = text[end + 1 + np.arange(most) % (len(text) - 1 - end)]
        elif options.synthetic_acceptance is not None:
            drafts[row] = text[-1]
        num_drafts[row] = room if end is not None or options.synthetic_acceptance is not None else 0


def latest_match(text: np.ndarray, min_ngram: int, max_ngram: int) -> int | None:
    """Index of the last token of the latest earlier occurrence of the text's last tokens, of which as many as possible match."""
    ends = np.flatnonzero(text[:-1] == text[-1])
    best = None
    for length in range(1, max_ngram + 1):
        if not ends.size:
            break
        if length >= min_ngram:
            best = int(ends[-1])
        ends = ends[ends >= length]
        ends = ends[text[ends - length] == text[-1 - length]] if ends.size else ends
    return best


def prepare_drafts(
    state: SlotState,
    slots: Tensor,
    buffers: DraftBuffers,
    rows: DraftRows,
    inputs: StepInputs,
    block_size: int,
) -> None:
    """Prepare the inputs of a step whose rows feed the last token and the drafts of `slots`, int32 [R]; T = R * Q.

    Padded tokens get id 0, position 0, slot -1; padding rows are empty. `position` of the slots stays.
    """
    ids, positions, seq_lens, slot_mapping = inputs
    query_len, sampled = rows.query_len, buffers.sampled
    assert ids.numel() == slots.numel() * query_len == slot_mapping.shape[-1]
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_prepare_drafts

        synthetic = buffers.options.synthetic_acceptance is not None
        from_model = buffers.options.from_model
        launch_prepare_drafts(state, sampled, slots, rows, inputs, block_size, synthetic, from_model)
        return
    row_slots, arrays = slots.numpy(), state.host_arrays
    running = row_slots >= 0
    lengths = np.where(running, rows.num_drafts.numpy() + 1, 0)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    rows.query_start.numpy()[...] = starts
    row = np.repeat(np.arange(len(row_slots)), lengths)
    offset = np.arange(total) - starts[row]
    token_slots = row_slots[row]
    drafts = rows.drafts.numpy().reshape(len(row_slots), -1)
    if buffers.options.from_model:
        drafts[...] = np.maximum(rows.model_tokens.numpy().T, 0)
    at = arrays["position"][token_slots] + offset
    out_ids, out_positions, mapping = ids.numpy(), positions.numpy(), slot_mapping.numpy()
    out_ids[:total] = np.where(offset > 0, drafts[row, offset - 1], arrays["last_token"][token_slots])
    out_positions[:total] = at
    fill_slot_mapping(state, token_slots, at, block_size, mapping[..., :total])
    out_ids[total:], out_positions[total:], mapping[..., total:] = 0, 0, -1
    seq_lens.numpy()[...] = np.where(running, arrays["position"][row_slots] + lengths, 0)

    place = np.arange(query_len)
    rows.logits_index.numpy()[...] = (
        starts[:-1, None] + np.minimum(place, np.maximum(lengths - 1, 0)[:, None])
    ).ravel()
    drawn = (place < lengths[:, None]).ravel()
    rows.entries.numpy()[...] = np.where(drawn, np.arange(drawn.size), -1)
    _gather(state, row_slots, sampled, query_len)


def fill_rope_offsets(state: SlotState, slots: Tensor, query_start: Tensor, out: Tensor) -> None:
    """What a model with `rope_axes` adds to the positions of generated tokens, drafts among them: `rope_delta` of each token's row.

    slots int32 [R], query_start int32 [R + 1], out int64 [A, T]; padded tokens get that of any row.
    """
    tokens = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    row = torch.searchsorted(query_start[1:], tokens, right=True).clamp(max=slots.numel() - 1)
    out.copy_(state.rope_delta[slots[row].clamp(min=0).long()])


def _gather(state: SlotState, row_slots: np.ndarray, sampled: SlotState, query_len: int) -> None:
    """The sampler's parameters of each entry, from its row's slot; [R] slots on the CPU."""
    entry_slots, arrays = np.repeat(row_slots, query_len), state.host_arrays
    size, place = entry_slots.size, np.tile(np.arange(query_len), len(row_slots))
    for name in (*SAMPLED, "stop_ids"):
        sampled.host_arrays[name][:size] = arrays[name][entry_slots]
    sampled.host_arrays["position"][:size] = arrays["position"][entry_slots] + place


def catch_up(
    state: SlotState,
    slots: Tensor,
    buffers: DraftBuffers,
    rows: DraftRows,
    inputs: StepInputs,
    block_size: int,
) -> None:
    """Prepare a forward of the draft model over the tokens that it lacks; T = R * (most tokens of a row), slots int32 [R].

    The ids are those of the positions, or with `token_shift` those after them. A row whose last token is among them has drafts,
    as many as `draft_limit` allows; rows at their limit are empty. logits_index [:R] are the last tokens. Writes num_drafts,
    model_entries and the sampler's parameters as well.
    """
    ids, positions, seq_lens, slot_mapping = inputs
    most = ids.numel() // slots.numel()
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_catch_up

        shift = buffers.options.token_shift
        launch_catch_up(state, buffers.sampled, slots, rows, inputs, block_size, most, shift)
        return
    row_slots, arrays, shift = slots.numpy(), state.host_arrays, buffers.options.token_shift
    last = arrays["position"][row_slots] - shift
    room = arrays["draft_limit"][row_slots] - arrays["position"][row_slots]
    drafting = (row_slots >= 0) & (room > 0) & (last >= 0)
    first = np.minimum(arrays["draft_computed"][row_slots], last)
    lengths = np.where(drafting, np.minimum(last + 1 - first, most), 0)
    is_ready = drafting & (first + lengths > last)
    rows.matches.numpy()[...] = np.where(drafting, np.where(is_ready, 1, -1) * (first + lengths + 1), 0)
    num_drafts = np.where(is_ready, np.minimum(room, rows.query_len - 1), 0)
    rows.num_drafts.numpy()[...] = num_drafts
    starts = np.concatenate([[0], np.cumsum(lengths)])
    total = int(starts[-1])
    rows.query_start.numpy()[...] = starts
    row = np.repeat(np.arange(len(row_slots)), lengths)
    at = np.arange(total) - starts[row] + first[row]
    out_ids, out_positions, mapping = ids.numpy(), positions.numpy(), slot_mapping.numpy()
    out_ids[:total], out_positions[:total] = arrays["history"][row_slots[row], at + shift], at
    fill_slot_mapping(state, row_slots[row], at, block_size, mapping[..., :total])
    out_ids[total:], out_positions[total:], mapping[..., total:] = 0, 0, -1
    seq_lens.numpy()[...] = np.where(lengths > 0, first + lengths, 0)
    # An empty row names the token before it: the one after it may be outside the forward.
    rows.logits_index.numpy()[: len(row_slots)] = np.maximum(starts[1:] - 1, 0)
    place = np.arange(rows.query_len - 1)[:, None]
    entries = np.arange(len(row_slots)) * rows.query_len + place
    rows.model_entries.numpy()[...] = np.where(place < num_drafts, entries, -1)
    _gather(state, row_slots, buffers.sampled, rows.query_len)


def finish_catch_up(state: SlotState, slots: Tensor, rows: DraftRows) -> None:
    """Enter what `catch_up` computes into the slots, int32 [R], where no `accept` follows."""
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_finish_catch_up

        launch_finish_catch_up(state, slots, rows)
        return
    matches = rows.matches.numpy()
    state.host_arrays["draft_computed"][slots.numpy()[matches != 0]] = abs(matches[matches != 0]) - 1
    matches[...] = 0


def feed_draft(
    state: SlotState,
    slots: Tensor,
    rows: DraftRows,
    place: int,
    inputs: StepInputs,
    block_size: int,
    token_shift: int = 0,
) -> None:
    """Prepare a decode forward of the draft model over draft `place`, from 1, of each row of slots, int32 [R]; T = R.

    Rows without such a draft are padding, with -1 in model_slots.
    """
    ids, positions, seq_lens, slot_mapping = inputs
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_feed_draft

        launch_feed_draft(state, slots, rows, place, inputs, block_size, token_shift)
        return
    row_slots = slots.numpy()
    active = rows.num_drafts.numpy() > place
    at = np.where(active, state.host_arrays["position"][row_slots] + place - token_shift, 0)
    rows.model_slots.numpy()[...] = np.where(active, row_slots, -1)
    ids.numpy()[...] = np.where(active, np.maximum(rows.model_tokens.numpy()[place - 1], 0), 0)
    positions.numpy()[...] = at
    seq_lens.numpy()[...] = np.where(active, at + 1, 0)
    fill_slot_mapping(state, np.where(active, row_slots, -1), at, block_size, slot_mapping.numpy())


def note_computed(state: SlotState, slots: Tensor, query_start: Tensor, positions: Tensor) -> None:
    """Enter the tokens of a step with prompts into `draft_computed`, unless some before them are missing.

    After `prepare`, whose arguments these are, and before `advance`: slots int32 [R], query_start int32 [R + 1], positions [T].
    """
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_note_computed

        launch_note_computed(state, slots, query_start, positions)
        return
    starts, arrays = query_start.numpy(), state.host_arrays
    filled = (np.diff(starts) > 0) & (slots.numpy() >= 0)
    active, first = slots.numpy()[filled], positions.numpy()[starts[:-1][filled]]
    computed = arrays["draft_computed"]
    end = np.maximum(computed[active], arrays["position"][active] + 1)
    computed[active] = np.where(first <= computed[active], end, computed[active])


def next_tokens(state: SlotState, slots: Tensor, query_start: Tensor, positions: Tensor, out: Tensor) -> None:
    """The token after each token of a step with prompts, after `advance`, from the histories; 0 where there is none.

    slots int32 [R], query_start int32 [R + 1], positions int64 [T], out int64 [T].
    """
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_next_tokens

        launch_next_tokens(state, slots, query_start, positions, out)
        return
    starts, behind, ids = query_start.numpy(), positions.numpy() + 1, out.numpy()
    ids[...] = 0
    token_slots = np.full(len(ids), -1)
    token_slots[: starts[-1]] = np.repeat(slots.numpy(), np.diff(starts))
    known = (token_slots >= 0) & (behind < state.history_len)
    # A slot without drafts may have no history.
    ids[known] = np.maximum(state.host_arrays["history"][token_slots[known], behind[known]], 0)


def accept(state: SlotState, slots: Tensor, options: DraftOptions, rows: DraftRows) -> None:
    """Keep the drawn tokens `rows.tokens` after the last token and after each draft that equals the token drawn before it.

    Of a row's tokens, the first stop id whose position is not below min_position is the last to be kept. The slot advances by the
    kept tokens. `rows.out`: [R, Q] the kept tokens, as `advance` writes one, NOT_EMITTED after them; then [R] the numbers of
    drafts. A draft model has computed the last token and all drafts but the last, of which those that were kept count. What a head
    has computed of drafts does not count.
    """
    threshold = -1 if options.synthetic_acceptance is None else round(options.synthetic_acceptance * 2**32)
    if state.device.type == "cuda":
        from torchweave.ops.kernels.speculation import launch_accept

        launch_accept(state, slots, rows, threshold, options.from_model, options.token_shift)
        return
    row_slots, arrays, num_rows = slots.numpy(), state.host_arrays, slots.numel()
    drawn = rows.tokens.numpy().reshape(num_rows, -1)
    drafts, num_drafts = rows.drafts.numpy().reshape(num_rows, -1), rows.num_drafts.numpy()
    encoded = rows.out.numpy()[: drawn.size].reshape(drawn.shape)
    rows.out.numpy()[drawn.size :] = num_drafts
    encoded[...] = NOT_EMITTED
    before = arrays["position"][row_slots]
    alive = row_slots >= 0
    for place in range(drawn.shape[1]):
        active, active_slots = np.flatnonzero(alive), row_slots[alive]
        if not active.size:
            break
        tokens = drawn[active, place]
        at = arrays["position"][active_slots] + 1
        draft = drafts[active, place] if place < drafts.shape[1] else tokens
        right = (num_drafts[active] > place) & (draft == tokens)
        if threshold >= 0:
            right = (num_drafts[active] > place) & (synthetic_words(at) < threshold)
            tokens = np.where(right, draft, tokens)
        stop = (arrays["stop_ids"][active_slots] == tokens[:, None]).any(axis=1) & (
            at >= arrays["min_position"][active_slots]
        )
        known = np.maximum(tokens, 0)  # an invalid token is no index of an embedding
        arrays["last_token"][active_slots], arrays["position"][active_slots] = known, at
        inside = at < state.history_len
        arrays["history"][active_slots[inside], at[inside]] = known[inside]
        encoded[active, place] = np.where(stop, -1 - tokens, tokens)
        alive[active] = right & ~stop
    if options.from_model:
        num_emitted = arrays["position"][row_slots] - before
        matches = rows.matches.numpy()
        counts = (num_drafts > 0) & (options.token_shift == 0)
        computed = np.where(counts, before + np.minimum(num_emitted, num_drafts), abs(matches) - 1)
        arrays["draft_computed"][row_slots[matches != 0]] = computed[matches != 0]
        matches[...] = 0


def synthetic_words(positions: np.ndarray) -> np.ndarray:
    """A 32-bit word for each position, as int64; any hash does."""
    word = (positions.astype(np.uint64) * np.uint64(0x9E3779B1)) & np.uint64(0xFFFFFFFF)
    word ^= word >> np.uint64(15)
    word = (word * np.uint64(0x85EBCA77)) & np.uint64(0xFFFFFFFF)
    word ^= word >> np.uint64(13)
    return word.astype(np.int64)
