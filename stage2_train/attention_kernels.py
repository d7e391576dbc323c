# ruff: noqa: N803, N806
"""Triton kernels of attention over two runs of keys: some context, and some of one's own block.

A program holds the rows of a few whole blocks, the query heads that share a key head laid side by
side. All its rows see nearly the same context, for anchors are sorted: only tiles at the ends of
the rows' runs are masked. What a block gives to its own keys stays in one program, in both
directions; context keys gather from many blocks, in a kernel of their own. Nothing is added
atomically, so results are the same every time.
"""

import triton
import triton.language as tl


@triton.jit
def _tile_of_rows(
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, PACK: tl.constexpr, ROWS: tl.constexpr
):
    """Gives the tile's first query, its rows' queries and heads, and its key head."""
    QUERIES: tl.constexpr = ROWS // PACK
    # Later anchors see more: their tiles start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    group = tl.program_id(1)
    kv_head = group * PACK // (HEADS // KV_HEADS)
    row = tl.arange(0, ROWS)
    first = tile * QUERIES
    return first, first + row // PACK, group * PACK + row % PACK, kv_head


@triton.jit
def _context_tiles(start, stop, KEYS: tl.constexpr):
    """Gives the first key of the tiles that hold visible keys and of those that hold no other.

    Tiles in [first, full) and [rest, last) are masked, those in [full, rest) are not.
    """
    is_empty = start >= stop
    first = tl.min(tl.where(is_empty, 2147483647, start), axis=0)
    last = tl.max(tl.where(is_empty, 0, stop), axis=0)
    first = tl.minimum(first, last) // KEYS * KEYS
    full = tl.minimum((tl.max(start, axis=0) + KEYS - 1) // KEYS * KEYS, last)
    full = tl.maximum(full, first)
    rest = tl.maximum(tl.minimum(tl.min(stop, axis=0) // KEYS * KEYS, last), full)
    return first, full, rest, last


@triton.jit
def _softmax_step(
    queries, keys, values, seen, largest, total, mixed, scale, IS_MASKED: tl.constexpr
):
    products = tl.dot(queries, tl.trans(keys)) * scale
    if IS_MASKED:
        products = tl.where(seen, products, float("-inf"))
    larger = tl.maximum(largest, tl.max(products, axis=1))
    weights = tl.exp2(products - larger[:, None])
    shrink = tl.exp2(largest - larger)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None])
    return larger, total, mixed


@triton.jit
def forward_kernel(
    queries,
    context_keys,
    context_values,
    own_keys,
    own_values,
    mixed,
    log_sums,
    context_start,
    context_stop,
    own_start,
    own_stop,
    scale,
    num_context,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of rows: attends to its own block's keys, then to the context."""
    QUERIES: tl.constexpr = ROWS // PACK
    first_query, query, head, kv_head = _tile_of_rows(HEADS, KV_HEADS, PACK, ROWS)
    lane = tl.arange(0, HEAD_DIM)
    place = (query * HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
    rows = tl.load(queries + place)

    own = first_query + tl.arange(0, QUERIES)
    own_place = (own * KV_HEADS + kv_head)[:, None] * HEAD_DIM + lane[None, :]
    key_tile = tl.load(own_keys + own_place)
    value_tile = tl.load(own_values + own_place)
    start = tl.load(own_start + query) - num_context
    stop = tl.load(own_stop + query) - num_context
    seen = (own[None, :] >= start[:, None]) & (own[None, :] < stop[:, None])
    # A row sees at least its own key: its maximum is finite from here on.
    products = tl.where(seen, tl.dot(rows, tl.trans(key_tile)) * scale, float("-inf"))
    largest = tl.max(products, axis=1)
    weights = tl.exp2(products - largest[:, None])
    total = tl.sum(weights, axis=1)
    sums = tl.dot(weights.to(value_tile.dtype), value_tile)

    start = tl.load(context_start + query)
    stop = tl.load(context_stop + query)
    first, full, rest, last = _context_tiles(start, stop, KEYS)
    column = tl.arange(0, KEYS)
    base = kv_head * HEAD_DIM + column[:, None] * (KV_HEADS * HEAD_DIM) + lane[None, :]
    for key in range(full, rest, KEYS):
        offset = key * (KV_HEADS * HEAD_DIM)
        keys = tl.load(context_keys + offset + base)
        values = tl.load(context_values + offset + base)
        largest, total, sums = _softmax_step(
            rows, keys, values, seen, largest, total, sums, scale, False
        )
    num_before = (full - first + KEYS - 1) // KEYS
    num_masked = num_before + (last - rest + KEYS - 1) // KEYS
    for number in range(num_masked):
        key = tl.where(
            number < num_before, first + number * KEYS, rest + (number - num_before) * KEYS
        )
        inside = (key + column < num_context)[:, None]
        offset = key * (KV_HEADS * HEAD_DIM)
        keys = tl.load(context_keys + offset + base, mask=inside, other=0.0)
        values = tl.load(context_values + offset + base, mask=inside, other=0.0)
        spot = key + column
        is_seen = (spot[None, :] >= start[:, None]) & (spot[None, :] < stop[:, None])
        largest, total, sums = _softmax_step(
            rows, keys, values, is_seen, largest, total, sums, scale, True
        )
    tl.store(mixed + place, (sums / total[:, None]).to(mixed.dtype.element_ty))
    tl.store(log_sums + query * HEADS + head, largest + tl.log2(total))


@triton.jit
def _slopes(rows, slopes, keys, values, seen, log_sum, delta, scale, IS_MASKED: tl.constexpr):
    """Gives the weights and the slopes of the products of a tile, rows first."""
    weights = tl.exp2(tl.dot(rows, tl.trans(keys)) * scale - log_sum[:, None])
    if IS_MASKED:
        weights = tl.where(seen, weights, 0.0)
    return weights, weights * (tl.dot(slopes, tl.trans(values)) - delta[:, None])


@triton.jit
def backward_rows_kernel(
    queries,
    context_keys,
    context_values,
    own_keys,
    own_values,
    mixed,
    slopes_of_mixed,
    log_sums,
    deltas,
    slopes_of_queries,
    slopes_of_own_keys,
    slopes_of_own_values,
    context_start,
    context_stop,
    own_start,
    own_stop,
    scale,
    slope_scale,
    num_context,
    num_queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of rows: slopes of its queries and of its own keys and values."""
    QUERIES: tl.constexpr = ROWS // PACK
    PARTS: tl.constexpr = HEADS // KV_HEADS // PACK
    first_query, query, head, kv_head = _tile_of_rows(HEADS, KV_HEADS, PACK, ROWS)
    lane = tl.arange(0, HEAD_DIM)
    place = (query * HEADS + head)[:, None] * HEAD_DIM + lane[None, :]
    slopes = tl.load(slopes_of_mixed + place)
    delta = tl.sum(tl.load(mixed + place).to(tl.float32) * slopes.to(tl.float32), axis=1)
    tl.store(deltas + query * HEADS + head, delta)
    rows = tl.load(queries + place)
    log_sum = tl.load(log_sums + query * HEADS + head)

    own = first_query + tl.arange(0, QUERIES)
    own_place = (own * KV_HEADS + kv_head)[:, None] * HEAD_DIM + lane[None, :]
    key_tile = tl.load(own_keys + own_place)
    value_tile = tl.load(own_values + own_place)
    start = tl.load(own_start + query) - num_context
    stop = tl.load(own_stop + query) - num_context
    seen = (own[None, :] >= start[:, None]) & (own[None, :] < stop[:, None])
    own_weights, own_inner = _slopes(
        rows, slopes, key_tile, value_tile, seen, log_sum, delta, scale, True
    )
    narrow = own_inner.to(rows.dtype)
    sums = tl.dot(narrow, key_tile)
    of_keys = tl.dot(tl.trans(narrow), rows) * slope_scale
    of_values = tl.dot(tl.trans(own_weights.to(rows.dtype)), slopes)
    # Groups of heads that do not fit beside each other each give a part.
    part = tl.program_id(1) % PARTS
    part_place = part * num_queries * KV_HEADS * HEAD_DIM + own_place
    tl.store(slopes_of_own_keys + part_place, of_keys.to(slopes_of_own_keys.dtype.element_ty))
    tl.store(slopes_of_own_values + part_place, of_values.to(slopes_of_own_values.dtype.element_ty))

    start = tl.load(context_start + query)
    stop = tl.load(context_stop + query)
    first, full, rest, last = _context_tiles(start, stop, KEYS)
    column = tl.arange(0, KEYS)
    base = kv_head * HEAD_DIM + column[:, None] * (KV_HEADS * HEAD_DIM) + lane[None, :]
    for key in range(full, rest, KEYS):
        offset = key * (KV_HEADS * HEAD_DIM)
        keys = tl.load(context_keys + offset + base)
        values = tl.load(context_values + offset + base)
        inner = _slopes(rows, slopes, keys, values, seen, log_sum, delta, scale, False)[1]
        sums = tl.dot(inner.to(keys.dtype), keys, sums)
    num_before = (full - first + KEYS - 1) // KEYS
    num_masked = num_before + (last - rest + KEYS - 1) // KEYS
    for number in range(num_masked):
        key = tl.where(
            number < num_before, first + number * KEYS, rest + (number - num_before) * KEYS
        )
        inside = (key + column < num_context)[:, None]
        offset = key * (KV_HEADS * HEAD_DIM)
        keys = tl.load(context_keys + offset + base, mask=inside, other=0.0)
        values = tl.load(context_values + offset + base, mask=inside, other=0.0)
        spot = key + column
        is_seen = (spot[None, :] >= start[:, None]) & (spot[None, :] < stop[:, None])
        inner = _slopes(rows, slopes, keys, values, is_seen, log_sum, delta, scale, True)[1]
        sums = tl.dot(inner.to(keys.dtype), keys, sums)
    tl.store(slopes_of_queries + place, (sums * slope_scale).to(slopes_of_queries.dtype.element_ty))


@triton.jit
def _keys_step(
    queries,
    slopes_of_mixed,
    log_sums,
    deltas,
    context_start,
    context_stop,
    first_query,
    group,
    spot,
    keys,
    values,
    of_keys,
    of_values,
    scale,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    IS_MASKED: tl.constexpr,
):
    """Adds what one tile of rows gives to a tile of context keys; keys first."""
    row = tl.arange(0, ROWS)
    query, head = first_query + row // PACK, group * PACK + row % PACK
    number = query * HEADS + head
    place = number[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    rows = tl.load(queries + place)
    slopes = tl.load(slopes_of_mixed + place)
    log_sum = tl.load(log_sums + number)
    delta = tl.load(deltas + number)
    products = tl.dot(keys, tl.trans(rows))
    # Made here, and not where it is needed: products wait for those before them.
    slopes_of_weights = tl.dot(values, tl.trans(slopes))
    weights = tl.exp2(products * scale - log_sum[None, :])
    if IS_MASKED:
        start, stop = tl.load(context_start + query), tl.load(context_stop + query)
        seen = (spot[:, None] >= start[None, :]) & (spot[:, None] < stop[None, :])
        weights = tl.where(seen, weights, 0.0)
    of_values = tl.dot(weights.to(slopes.dtype), slopes, of_values)
    inner = weights * (slopes_of_weights - delta[None, :])
    of_keys = tl.dot(inner.to(rows.dtype), rows, of_keys)
    return of_keys, of_values


@triton.jit
def backward_context_kernel(
    queries,
    context_keys,
    context_values,
    slopes_of_mixed,
    log_sums,
    deltas,
    slopes_of_keys,
    slopes_of_values,
    context_start,
    context_stop,
    query_ranges,
    scale,
    slope_scale,
    num_context,
    num_chunks,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PACK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """One tile of context keys: what a chunk of the queries that see it gives to it."""
    QUERIES: tl.constexpr = ROWS // PACK
    PARTS: tl.constexpr = HEADS // KV_HEADS // PACK
    # Early keys have most to do: they start first.
    kv_head = tl.program_id(0) % KV_HEADS
    split = tl.program_id(0) // KV_HEADS % (num_chunks * PARTS)
    tile = tl.program_id(0) // KV_HEADS // (num_chunks * PARTS)
    group, chunk = kv_head * PARTS + split % PARTS, split // PARTS
    lane = tl.arange(0, HEAD_DIM)
    spot = tile * KEYS + tl.arange(0, KEYS)
    inside = (spot < num_context)[:, None]
    place = (spot * KV_HEADS + kv_head)[:, None] * HEAD_DIM + lane[None, :]
    keys = tl.load(context_keys + place, mask=inside, other=0.0)
    values = tl.load(context_values + place, mask=inside, other=0.0)
    of_keys = tl.zeros((KEYS, HEAD_DIM), dtype=tl.float32)
    of_values = tl.zeros((KEYS, HEAD_DIM), dtype=tl.float32)

    ranges = query_ranges + tile * 4
    first, last = tl.load(ranges) // QUERIES * QUERIES, tl.load(ranges + 3)
    share = tl.cdiv(tl.cdiv(last - first, num_chunks), QUERIES) * QUERIES
    first += chunk * share
    last = tl.minimum(first + share, last)
    full = (tl.load(ranges + 1) + QUERIES - 1) // QUERIES * QUERIES
    full = tl.maximum(tl.minimum(full, last), first)
    rest = tl.minimum(tl.load(ranges + 2) // QUERIES * QUERIES, last)
    rest = tl.maximum(rest, full)
    num_before = (full - first + QUERIES - 1) // QUERIES
    num_masked = num_before + tl.maximum(last - rest + QUERIES - 1, 0) // QUERIES
    for query in range(full, rest, QUERIES):
        of_keys, of_values = _keys_step(
            queries,
            slopes_of_mixed,
            log_sums,
            deltas,
            context_start,
            context_stop,
            query,
            group,
            spot,
            keys,
            values,
            of_keys,
            of_values,
            scale,
            HEADS,
            HEAD_DIM,
            PACK,
            ROWS,
            False,
        )
    for number in range(num_masked):
        query = tl.where(
            number < num_before,
            first + number * QUERIES,
            rest + (number - num_before) * QUERIES,
        )
        of_keys, of_values = _keys_step(
            queries,
            slopes_of_mixed,
            log_sums,
            deltas,
            context_start,
            context_stop,
            query,
            group,
            spot,
            keys,
            values,
            of_keys,
            of_values,
            scale,
            HEADS,
            HEAD_DIM,
            PACK,
            ROWS,
            True,
        )
    split_place = split * num_context * KV_HEADS * HEAD_DIM + place
    tl.store(slopes_of_keys + split_place, of_keys * slope_scale, mask=inside)
    tl.store(slopes_of_values + split_place, of_values, mask=inside)
