//! Cascade: contexts that start with the same blocks are read once for all of their queries.

use std::ops::Range;

use candle_core::Tensor;

use super::attention::{AttnState, paged_attention, paged_attention_state};
use super::merge::{merge_states, take_sinks};
use super::{AttentionOptions, Mask, PageTable, check};
use crate::error::{Error, Result};

/// Which sequences of a [`PageTable`] share leading blocks, and the tables of the parts:
/// `shared` has one sequence per prefix, whose rows are those of all its members; `own` has
/// what each member sees besides; `rest` has the sequences that share nothing.
///
/// A prefix is made of whole blocks before the first query of every member, so that every
/// query of theirs sees all of it. A sequence joins one prefix at most: where prefixes are
/// nested (a system prompt for all, a document for some) the choice is the one that saves the
/// most, whole subtrees at a time.
///
/// # When it is worth it
/// A prefix of `t` tokens and `m` members saves `t (m − 1)` reads of a token's K/V. Each query
/// row of a member pays: it has two F32 states, which are written, read and merged, in place
/// of one output, about `10 · heads / kv_heads / bytes of an element` tokens' worth of memory
/// traffic (2.5 for F32 without groups, 20 for BF16 in groups of 4); its own part has the
/// fixed costs of a context; and it bears its share of the ops that the cascade has more. The
/// rows of a chunk of a prompt wait for arithmetic more than for memory, and there are many of
/// them: they seldom share. So a cascade takes what each row has to save, in tokens, and
/// chooses the prefixes with the largest saving after that; [`Cascade::ROW_COST`] is where
/// decode rows broke even when measured on a CPU.
///
/// The method is the split of a softmax by keys: Hydragen (Juravsky et al. 2024), and the
/// cascade of FlashInfer (Ye et al. 2025).
#[derive(Debug, Default)]
pub struct Cascade {
    mask: Mask,
    shared: PageTable,
    own: PageTable,
    rest: PageTable,
    /// The row of the batch that each row of the parts is: `own` (`shared` has the same rows),
    /// then `rest`.
    order: Vec<u32>,
    /// Where each row of the batch is in `order`.
    place: Vec<u32>,
    /// Whether the rows of the parts are those of the batch in their order.
    in_order: bool,
    /// How much later each row stands than `shared` says.
    shift: Vec<f32>,
    saved: usize,
    /// Slots of the parts: they write nothing.
    slots: Vec<i64>,
}

/// A sequence that can share, and what has been chosen for it.
struct Reader<'a> {
    seq: usize,
    /// Leading pages that every row sees whole.
    pages: &'a [u32],
    rows: usize,
    /// Of these, the number it reads together with others.
    shared: usize,
    /// A sequence that names the prefix: its first member.
    prefix: usize,
}

impl Cascade {
    /// Tokens that a row has to save to be worth its part in a cascade. Measured on a CPU with F32
    /// and BF16 caches: decode of 16 sequences broke even where each row saved 60 to 120 tokens,
    /// in groups of 4 heads too. Of 2 and 4 sequences it did at 60 to 130 without groups; in groups
    /// not below 190, and with 3 KV heads of dim 64 not at 190 either. Not yet measured on a GPU.
    pub const ROW_COST: usize = 128;

    /// Looks in `table` for shared prefixes that save more than `row_cost` tokens for each row
    /// of their members (0: any that saves reads), in place of those found before, and answers
    /// whether there are any. A window of `mask` has to be wider than the whole context of a
    /// member.
    ///
    /// Of prefixes that begin with one another, 64 are told apart. Costs a sort of the page lists,
    /// and a copy of them if anything is found; memory is reused.
    ///
    /// # Errors
    /// [`Error::PageTable`] if a part passes the range of u32.
    pub fn find(&mut self, table: &PageTable, mask: Mask, row_cost: usize) -> Result<bool> {
        self.mask = mask;
        self.saved = 0;
        for part in [&mut self.shared, &mut self.own, &mut self.rest] {
            part.restart(table.block_size());
        }
        self.order.clear();
        self.shift.clear();
        let mut readers = readers(table, mask);
        let terms = Terms {
            page: table.block_size() as i64,
            row: i64::try_from(row_cost).unwrap_or(i64::MAX),
        };
        if choose(&mut readers, 0, NESTED, &terms) == 0 {
            return Ok(false);
        }
        readers.retain(|reader| reader.shared > 0);
        readers.sort_unstable_by_key(|reader| (reader.prefix, reader.seq));
        for members in readers.chunk_by(|a, b| a.prefix == b.prefix) {
            self.push_prefix(table, members)?;
        }
        readers.sort_unstable_by_key(|reader| reader.seq);
        for seq in 0..table.num_seqs() {
            if readers
                .binary_search_by_key(&seq, |reader| reader.seq)
                .is_err()
            {
                let (pages, first) = table.pages(seq);
                self.order.extend(table.rows(seq).map(|row| row as u32));
                self.slots.resize(table.rows(seq).len(), -1);
                let len = table.seq_lens()[seq] as usize;
                self.rest.push(pages, first as u32, len, &self.slots)?;
            }
        }
        self.place.resize(self.order.len(), 0);
        for (place, &row) in self.order.iter().enumerate() {
            self.place[row as usize] = place as u32;
        }
        self.in_order = self.order.is_sorted();
        Ok(true)
    }

    /// Appends the parts of the members of one prefix.
    fn push_prefix(&mut self, table: &PageTable, members: &[Reader<'_>]) -> Result<()> {
        let pages = members.first().map_or(0, |member| member.shared);
        let len = pages * table.block_size();
        self.saved += len * (members.len() - 1);
        let first_row = self.order.len();
        for member in members {
            let rows = table.rows(member.seq);
            let context = table.seq_lens()[member.seq] as usize;
            self.slots.resize(rows.len(), -1);
            let own = &table.pages(member.seq).0[pages..];
            self.own.push(own, 0, context - len, &self.slots)?;
            self.order.extend(rows.clone().map(|row| row as u32));
            let positions = context - rows.len()..context;
            self.shift.extend(positions.map(|position| position as f32));
        }
        let rows = self.order.len() - first_row;
        for (i, shift) in self.shift[first_row..].iter_mut().enumerate() {
            *shift -= len as f32 - rows as f32 + i as f32;
        }
        self.slots.resize(rows, -1);
        let prefix = &members.first().map_or(&[][..], |member| member.pages)[..pages];
        self.shared.push(prefix, 0, len, &self.slots)
    }

    /// Tokens that are not read again: for each prefix its tokens, times its members but one.
    /// 0 if nothing is shared.
    pub fn tokens_saved(&self) -> usize {
        self.saved
    }

    /// Tokens of each prefix, and the query rows that read them together.
    pub fn prefixes(&self) -> impl Iterator<Item = (usize, usize)> {
        let lens = self.shared.seq_lens().iter().enumerate();
        lens.map(|(prefix, &len)| (len as usize, self.shared.rows(prefix).len()))
    }
}

/// The sequences of `table` that can share, sorted by their pages.
fn readers(table: &PageTable, mask: Mask) -> Vec<Reader<'_>> {
    let mut readers = Vec::with_capacity(table.num_seqs());
    for seq in 0..table.num_seqs() {
        let (pages, first) = table.pages(seq);
        let (rows, len) = (table.rows(seq).len(), table.seq_lens()[seq] as usize);
        // The last query sees the least of the start of its context.
        let sees_all = first == 0 && mask.keys(len as i64 - 1, len).start == 0;
        if rows == 0 || rows > len || !sees_all {
            continue;
        }
        let whole = (len - rows) / table.block_size();
        readers.push(Reader {
            seq,
            pages: &pages[..whole],
            rows,
            shared: 0,
            prefix: seq,
        });
    }
    readers.sort_unstable_by_key(|reader| reader.pages);
    readers
}

/// What counts in the choice, in tokens.
struct Terms {
    /// A page.
    page: i64,
    /// What a row pays.
    row: i64,
}

impl Terms {
    /// What a reader has of a prefix of `depth` pages, before the one read of it is paid.
    fn gain(&self, reader: &Reader<'_>, depth: usize) -> i64 {
        let pays = self.row.saturating_mul(reader.rows as i64);
        (self.page * depth as i64).saturating_sub(pays)
    }
}

/// Prefixes within prefixes that are looked for: more than conversations have, and few for the
/// stack and for the time.
const NESTED: usize = 64;

/// Chooses the prefixes of readers that are sorted and agree in their first `depth` pages, up to
/// `nested` of them one within the other. Answers the tokens that are saved, what the rows pay
/// taken off.
fn choose(readers: &mut [Reader<'_>], depth: usize, nested: usize, terms: &Terms) -> i64 {
    let [first, .., last] = &readers else {
        return 0;
    };
    if nested == 0 {
        return 0;
    }
    let pairs = first.pages[depth..].iter().zip(&last.pages[depth..]);
    // Sorted, so that what the first and the last agree in all do.
    let depth = depth + pairs.take_while(|(a, b)| a == b).count();
    // A reader whose pages end here goes on with nobody.
    let same_page = |a: &Reader<'_>, b: &Reader<'_>| {
        let page = a.pages.get(depth);
        page.is_some() && page == b.pages.get(depth)
    };
    let apart: Vec<i64> = readers
        .chunk_by_mut(same_page)
        .map(|part| choose(part, depth, nested - 1, terms))
        .collect();
    // A part either keeps its choice or joins the prefix of `depth` pages as a whole.
    let joined = |part: &[Reader<'_>]| -> i64 {
        let gains = part.iter().map(|reader| terms.gain(reader, depth));
        gains.fold(0, i64::saturating_add)
    };
    let parts = readers.chunk_by(same_page).zip(&apart);
    let together: i64 = parts.map(|(part, &apart)| apart.max(joined(part))).sum();
    let together = together - terms.page * depth as i64;
    if together <= apart.iter().sum() {
        return apart.iter().sum();
    }
    let mut prefix = None;
    for (part, &apart) in readers.chunk_by_mut(same_page).zip(&apart) {
        if joined(part) > apart {
            for reader in part {
                reader.shared = depth;
                reader.prefix = *prefix.get_or_insert(reader.seq);
            }
        }
    }
    together
}

/// [`paged_attention`] of the batch in whose table `cascade` was found, with the K/V of every
/// shared prefix read once: attention over prefixes and over the rest of each context,
/// combined by [`merge_states`], with the sinks at the end.
///
/// Operands and result are those of [`paged_attention`]; `options.mask` is the mask that
/// `cascade` was found for. The sums have another order than without the cascade, so the
/// result of a sequence that shares depends, in the last bits, on who shares with it. One that
/// does not share has the bits of [`paged_attention`].
///
/// Memory: F32 states of the rows that share; and a copy of `q` and of the output, unless the
/// members of each prefix come one behind the other, before all that share nothing.
///
/// # Errors
/// Those of [`paged_attention`]; [`Error::InvalidArgument`] for a cascade that found nothing or
/// another mask.
pub fn cascade_attention(
    q: &Tensor,
    k_cache: &Tensor,
    v_cache: &Tensor,
    cascade: &Cascade,
    options: &AttentionOptions,
) -> Result<Tensor> {
    let ops = (
        paged_attention as Plain,
        paged_attention_state as State,
        merge_states as Merge,
    );
    compose(ops, q, (k_cache, v_cache), cascade, options)
}

/// [`paged_attention`] or its portable twin.
type Plain = fn(&Tensor, &Tensor, &Tensor, &PageTable, &AttentionOptions) -> Result<Tensor>;
/// [`merge_states`] or its portable twin.
type Merge = fn(&AttnState, &AttnState) -> Result<AttnState>;
/// [`paged_attention_state`] or its portable twin.
type State = fn(&Tensor, &Tensor, &Tensor, &PageTable, &AttentionOptions) -> Result<AttnState>;

/// The cascade of any two ops that attend.
pub(super) fn compose(
    (attend, attend_state, merge): (Plain, State, Merge),
    q: &Tensor,
    (k_cache, v_cache): (&Tensor, &Tensor),
    cascade: &Cascade,
    options: &AttentionOptions,
) -> Result<Tensor> {
    const OP: &str = "cascade_attention";
    check::queries(OP, q, (k_cache, v_cache), cascade.order.len(), options)?;
    if cascade.saved == 0 || cascade.mask != options.mask {
        return Err(Error::InvalidArgument {
            op: OP,
            what: "cascade".into(),
            expected: format!("shared prefixes under {:?}", options.mask),
            got: format!("{} under {:?}", cascade.shared.num_seqs(), cascade.mask),
        });
    }
    let device = q.device();
    let sharing = cascade.own.num_rows();
    let rows = |range: Range<usize>| -> Result<Tensor> {
        if cascade.in_order {
            return Ok(q.narrow(0, range.start, range.len())?);
        }
        let rows = Tensor::new(&cascade.order[range], device)?;
        Ok(q.contiguous()?.index_select(&rows, 0)?)
    };

    let ours = rows(0..sharing)?;
    let mut part = options.clone();
    part.sinks = None;
    let own = attend_state(&ours, k_cache, v_cache, &cascade.own, &part)?;
    part.mask = Mask::Full;
    let mut shared = attend_state(&ours, k_cache, v_cache, &cascade.shared, &part)?;
    if let Some(slopes) = &options.alibi_slopes {
        // The rows of a prefix stand at its end, one behind the other. Standing elsewhere
        // moves all scores of a row by the same, and with them nothing but the sum.
        let shift = Tensor::from_slice(&cascade.shift, (sharing, 1), device)?;
        let slopes = Tensor::from_slice(slopes, (1, slopes.len()), device)?;
        shared.lse = (shared.lse - shift.broadcast_mul(&slopes)?)?;
    }
    let mut state = merge(&shared, &own)?;
    if let Some(sinks) = &options.sinks {
        state.out = take_sinks(&state, sinks)?;
    }
    let mut out = state.out.to_dtype(q.dtype())?;
    if cascade.rest.num_rows() > 0 {
        let others = rows(sharing..cascade.order.len())?;
        let others = attend(&others, k_cache, v_cache, &cascade.rest, options)?;
        out = Tensor::cat(&[&out, &others], 0)?;
    }
    if cascade.in_order {
        return Ok(out);
    }
    Ok(out.index_select(&Tensor::new(cascade.place.as_slice(), device)?, 0)?)
}
