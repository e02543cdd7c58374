#!/usr/bin/env bash
# Shows that the op tests can fail: plants one small fault after the other into a copy of the
# tree and demands that `cargo test --test ops` notices each of them; faults of linear layers are
# for `cargo test --lib --test linear`, which run the kernels of every instruction set.
#
#   scripts/planted_faults.sh [NAME...]     all faults, or those named
#
# Build products go to $CARGO_TARGET_DIR (default: target/), so dependencies are built once.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-$root/target}
# A panic is the expected outcome here; its backtraces are not.
export RUST_BACKTRACE=0
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && tar cf - --exclude=./target --exclude=./.git .) | tar xf - -C "$copy"
cd "$copy"

# name | file | text to find | text to put there; no text holds a bar
faults() {
    cat <<'LIST'
window_one_too_wide|src/ops/options.rs|past.saturating_sub(window)|(past - 1).saturating_sub(window)
last_token_lost|src/ops/options.rs|Self::Causal => 0..past.min(len)|Self::Causal => 0..(past - 1).min(len)
last_token_lost_portable|src/ops/portable.rs|seen(i).contains(&(begin + j))|seen(i).contains(&(begin + j + 1))
token_past_the_length|src/ops/cpu/plan.rs|visible(mask, first_row, len).start..len;|visible(mask, first_row, len).start..len.next_multiple_of(table.block_size());
wrong_kv_head_decode|src/ops/cpu/decode.rs|offset: head * dim,|offset: (head + 1) % kv_heads * dim,
wrong_kv_head_prefill|src/ops/cpu/prefill.rs|Rows::new(&v_context, &tile, head, v_dim)|Rows::new(&v_context, &tile, 0, v_dim)
wrong_query_head_decode|src/ops/cpu/lanes.rs|kv_head * self.group + within % self.group|kv_head + within % self.group
swapped_slopes_decode|src/ops/cpu/lanes.rs|of_row.zip(slopes.chunks_exact(self.group))|of_row.zip(slopes.rchunks_exact(self.group))
swapped_slopes_prefill|src/ops/cpu/prefill.rs|slopes[self.head * self.call.group + lane % self.call.group]|slopes[lane % self.call.group]
slope_off_by_one|src/ops/cpu/prefill.rs|(key as i64 - position) as f32|(key as i64 - position + 1) as f32
cap_left_out|src/ops/cpu/scores.rs|cap * tanh(*s * inverse)|cap * (*s * inverse)
sink_of_another_head|src/ops/cpu/attention.rs|(sinks[head] - top)|(sinks[0] - top)
chunk_weight_left_out|src/ops/cpu/attention.rs|sum += weight * record[1]|sum += record[1]
rescaling_left_out|src/ops/cpu/tile.rs|simd.mul_add(simd.load_f32(sum), shrink, parts[n][r])|simd.add(simd.load_f32(sum), parts[n][r])
tile_mask_one_too_wide|src/ops/cpu/prefill.rs|keys.end.max(seen.start)..seen.end|(keys.end + 1).max(seen.start).min(seen.end)..seen.end
tile_block_of_other_lanes|src/ops/cpu/prefill.rs|lane += registers * S::LANES;|lane += S::LANES;
merged_without_total|src/ops/merge.rs|(weight_a * part, weight_b * part)|(weight_a, weight_b)
cut_depends_on_batch|src/ops/cpu/plan.rs|cut(rows.len(), keys.len(), group)|cut(rows.len(), keys.len() / table.num_seqs(), group)
released_pages_forgotten|src/ops/cpu/cache.rs|(token >> self.shift) - self.first_page|(token >> self.shift)
padding_written|src/ops/cpu/rows.rs|usize::try_from(slot) else|usize::try_from(slot.max(0)) else
copies_in_order|src/ops/cpu/rows.rs|late.then(|false.then(
alias_not_seen|src/ops/check.rs|for cache in [k_cache, v_cache] {|for cache in [k_cache] {
linear_scale_of_another_output|src/ops/cpu/linear/blocks.rs|self.scales[at * TILE + lane] = number(0)|self.scales[at * TILE + lane / 2] = number(0)
linear_scales_of_the_first_lanes|src/ops/cpu/linear/blocks.rs|tile.scales.as_ptr().add(at)|tile.scales.as_ptr().add(block * TILE)
linear_offset_left_out|src/ops/cpu/linear/blocks.rs|if !MINIMA && offset != 0 {|if !MINIMA && offset == 1 {
linear_avx2_sign_left_out|src/ops/cpu/linear/registers.rs|_mm256_sign_epi8(x, weights)|x
linear_minimum_of_another_span|src/ops/cpu/linear/superblocks.rs|tile.minima.as_ptr().add(at * TILE + lane)|tile.minima.as_ptr().add(block * spans * TILE + lane)
linear_offset_of_six_bits|src/ops/cpu/linear/superblocks.rs|(simd, -32.0)|(simd, -31.0)
linear_upper_bits_of_a_scale|src/ops/cpu/linear/superblocks.rs|packed[4 + i] >> 6 << 4|packed[i] >> 6 << 4
linear_product_of_another_row|src/ops/cpu/linear/superblocks.rs|simd.mul_add(dots[r], scale, products[r])|simd.mul_add(dots[0], scale, products[r])
linear_tops_of_the_lower_half|src/ops/cpu/linear/registers.rs|top::<BITS>(tops, at + BITS)|top::<BITS>(tops, at)
linear_last_input_lost|src/ops/cpu/linear/dense.rs|for i in 0..inp {|for i in 0..inp / 2 * 2 {
LIST
}

# Replaces the first occurrence of a text by another, and fails if there is none.
plant() {
    local file=$1 find=$2 put=$3
    cp "$file" "$file.sound"
    # Both texts are literal: what sed would read as more than itself is quoted.
    find=$(printf '%s' "$find" | sed 's/[][\.*^$/]/\\&/g')
    put=$(printf '%s' "$put" | sed 's/[\&/]/\\&/g')
    sed -i.old "s/$find/$put/" "$file" && rm "$file.old"
    if cmp -s "$file" "$file.sound"; then
        echo "cannot plant in $file: the text is no longer there" >&2
        exit 2
    fi
}

# The tests that have to notice a fault in a file.
tests_of() {
    case $1 in
        src/ops/cpu/linear/*) echo --lib --test linear ;;
        *) echo --test ops ;;
    esac
}

# Takes what `tests_of` answers.
tests_pass() {
    cargo test --quiet "$@" >"$copy/log" 2>&1
}

if ! tests_pass --lib --test linear --test ops; then
    cat "$copy/log"
    echo "the tests fail without any fault" >&2
    exit 2
fi

missed=0
while IFS='|' read -r name file find put; do
    if [ $# -gt 0 ] && [[ " $* " != *" $name "* ]]; then
        continue
    fi
    plant "$file" "$find" "$put"
    # shellcheck disable=SC2046
    if tests_pass $(tests_of "$file"); then
        echo "MISSED  $name"
        missed=$((missed + 1))
    elif grep -q '^error.*could not compile' "$copy/log"; then
        grep -A8 '^error' "$copy/log" | head -20
        echo "the fault $name does not compile" >&2
        exit 2
    else
        echo "caught  $name by $(grep -c '^    [a-z][a-z0-9_:]*$' "$copy/log") tests"
    fi
    mv "$file.sound" "$file"
done < <(faults)

if [ "$missed" -gt 0 ]; then
    echo "$missed faults were missed" >&2
    exit 1
fi
