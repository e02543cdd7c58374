//! Random operation sequences on the cache against a naive model.
//!
//! The "model" behind the cache is a toy: the K/V row of a token is a hash of its namespace
//! and of every token up to it. A block that is shared, reused, copied, swapped or released
//! wrongly therefore shows as a wrong value, not only as a wrong count.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "cache_properties/check.rs"]
mod check;
mod common;

use std::collections::HashSet;

use candle_core::{DType, Device};
use candle_paged_attn::Error;
use candle_paged_attn::block::Namespace;
use candle_paged_attn::cache::{
    AddOptions, CacheConfig, CacheSize, CacheSpec, Feed, LayerShape, PagedKvCache, Pin, SequenceId,
    SwapId,
};
use common::toy::{Toy, poison, write_step};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Add {
        prompt: usize,
        len: usize,
        namespace: u8,
        read: bool,
        indexed: bool,
        fits: bool,
    },
    Feed {
        picks: Vec<(usize, usize)>,
        accept: Option<usize>,
        drop: bool,
    },
    Fork {
        pick: usize,
    },
    Truncate {
        pick: usize,
        keep: usize,
    },
    Remove {
        pick: usize,
    },
    Pin {
        pick: usize,
    },
    Unpin {
        pick: usize,
    },
    SwapOut {
        pick: usize,
    },
    SwapIn {
        pick: usize,
    },
    DiscardSwap {
        pick: usize,
    },
    Clear,
}

fn op() -> impl Strategy<Value = Op> {
    let any = 0usize..1000;
    prop_oneof![
        4 => (
            0usize..3,
            1usize..24,
            0u8..2,
            prop::bool::weighted(0.9),
            prop::bool::weighted(0.9),
            prop::bool::weighted(0.2),
        )
            .prop_map(|(prompt, len, namespace, read, indexed, fits)| {
                Op::Add { prompt, len, namespace, read, indexed, fits }
            }),
        10 => (
            prop::collection::vec((any.clone(), 1usize..10), 1..4),
            prop::option::weighted(0.2, 0usize..10),
            prop::bool::weighted(0.1),
        )
            .prop_map(|(picks, accept, drop)| Op::Feed { picks, accept, drop }),
        2 => any.clone().prop_map(|pick| Op::Fork { pick }),
        2 => (any.clone(), any.clone()).prop_map(|(pick, keep)| Op::Truncate { pick, keep }),
        3 => any.clone().prop_map(|pick| Op::Remove { pick }),
        1 => any.clone().prop_map(|pick| Op::Pin { pick }),
        1 => any.clone().prop_map(|pick| Op::Unpin { pick }),
        3 => any.clone().prop_map(|pick| Op::SwapOut { pick }),
        3 => any.clone().prop_map(|pick| Op::SwapIn { pick }),
        1 => any.prop_map(|pick| Op::DiscardSwap { pick }),
        1 => Just(Op::Clear),
    ]
}

/// A sequence as the naive model knows it: what is committed, and the rest of its prompt.
#[derive(Debug, Clone)]
struct Naive {
    id: SequenceId,
    namespace: u8,
    indexed: bool,
    tokens: Vec<u32>,
    prompt: Vec<u32>,
}

/// What is switched on.
#[derive(Debug, Clone, Copy)]
struct Switches {
    sub_block: bool,
    deduplicate: bool,
    host: Option<usize>,
}

/// Three prompts that share their first tokens.
fn prompt(which: usize, len: usize) -> Vec<u32> {
    (0..len)
        .map(|i| {
            if i < 6 + 5 * which {
                i as u32
            } else {
                (100 * which + i) as u32
            }
        })
        .collect()
}

fn namespace(n: u8) -> Namespace {
    match n {
        0 => Namespace::default(),
        n => Namespace::default().with_adapter("adapter", u64::from(n)),
    }
}

struct World {
    cache: PagedKvCache,
    block_size: usize,
    windows: Vec<Option<usize>>,
    switches: Switches,
    live: Vec<Naive>,
    gone: Vec<SequenceId>,
    pins: Vec<Pin>,
    /// Sequences on the host, with the blocks that each held, per group.
    swapped: Vec<(SwapId, Naive, Vec<usize>)>,
    spent: Vec<SwapId>,
    /// Every committed prefix of whole blocks, while nothing was evicted.
    known: HashSet<(u8, Vec<u32>)>,
    evicted: bool,
    /// A sequence came back with blocks of its own: equal ones may exist.
    swapped_in: bool,
}

impl World {
    fn new(
        block_size: usize,
        blocks: usize,
        windows: Vec<Option<usize>>,
        switches: Switches,
    ) -> Self {
        let shapes: Vec<_> = windows
            .iter()
            .map(|&window| LayerShape {
                window,
                kv_heads: 1,
                k_dim: 8,
                v_dim: 16,
            })
            .collect();
        let spec = CacheSpec::from_layers(&shapes, DType::F32).unwrap();
        let mut config = CacheConfig::blocks(blocks)
            .with_block_size(block_size)
            .with_events();
        config.sub_block_reuse = switches.sub_block;
        config.deduplicate = switches.deduplicate;
        config.host = switches.host.map(CacheSize::Blocks);
        let cache = PagedKvCache::new(&spec, &config, &Device::Cpu).unwrap();
        poison(&cache);
        let (live, gone, pins) = (vec![], vec![], vec![]);
        let (swapped, spent) = (vec![], vec![]);
        Self {
            cache,
            block_size,
            windows,
            switches,
            live,
            gone,
            pins,
            swapped,
            spent,
            known: HashSet::new(),
            evicted: false,
            swapped_in: false,
        }
    }

    fn tables(&self) -> Vec<(usize, Vec<u32>)> {
        let groups = self.cache.spec().groups.len();
        let ids = self.live.iter().map(|s| s.id);
        ids.flat_map(|id| (0..groups).map(move |g| (id, g)))
            .map(|(id, g)| self.cache.block_table(id, g).unwrap())
            .collect()
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Add {
                prompt: which,
                len,
                namespace: n,
                read,
                indexed,
                fits,
            } => {
                let prompt = prompt(*which, *len);
                let mut options = AddOptions::default().with_namespace(namespace(*n));
                options.read_prefix = *read;
                if !indexed {
                    options = options.unindexed();
                }
                self.add(prompt, *n, options, *fits);
            }
            Op::Feed {
                picks,
                accept,
                drop,
            } => self.feed(picks, *accept, *drop),
            Op::Fork { pick } if !self.live.is_empty() => {
                let mut copy = self.live[pick % self.live.len()].clone();
                copy.id = self.cache.fork(copy.id).unwrap();
                self.live.push(copy);
            }
            Op::Truncate { pick, keep } if !self.live.is_empty() => {
                let i = pick % self.live.len();
                let len = self.live[i].tokens.len();
                let keep = keep % (len + 1);
                // What the windows let go of when the sequence was `len` long is gone.
                let possible = keep == 0
                    || self.windows.iter().flatten().all(|window| {
                        let group =
                            (0..self.windows.len()).find(|&g| self.windows[g] == Some(*window));
                        let held = self
                            .cache
                            .block_table(self.live[i].id, self.group(group.unwrap()))
                            .unwrap()
                            .0;
                        (keep + 1).saturating_sub(*window) / self.block_size >= held
                    });
                assert_eq!(self.cache.truncate(self.live[i].id, keep).is_ok(), possible);
                if possible {
                    self.live[i].tokens.truncate(keep);
                }
                assert!(self.cache.truncate(self.live[i].id, len + 1).is_err());
            }
            Op::Remove { pick } if !self.live.is_empty() => {
                let naive = self.live.swap_remove(pick % self.live.len());
                self.cache.remove(naive.id).unwrap();
                self.gone.push(naive.id);
            }
            Op::Pin { pick } if !self.live.is_empty() => {
                let naive = &self.live[pick % self.live.len()];
                let pin = self.cache.pin(naive.id).unwrap();
                assert!(pin.tokens <= naive.tokens.len());
                self.pins.push(pin);
            }
            Op::Unpin { pick } if !self.pins.is_empty() => {
                let pin = self.pins.swap_remove(pick % self.pins.len());
                self.cache.unpin(pin).unwrap();
                assert!(matches!(
                    self.cache.unpin(pin),
                    Err(Error::StaleHandle { .. })
                ));
            }
            Op::SwapOut { pick } if !self.live.is_empty() => self.swap_out(*pick),
            Op::SwapIn { pick } if !self.swapped.is_empty() => self.swap_in(*pick),
            Op::DiscardSwap { pick } if !self.swapped.is_empty() => {
                let (swap, _, _) = self.swapped.swap_remove(pick % self.swapped.len());
                self.cache.discard_swap(swap).unwrap();
                self.spent.push(swap);
            }
            Op::Clear => {
                self.cache.clear();
                self.gone.extend(self.live.drain(..).map(|s| s.id));
                self.spent.extend(self.swapped.drain(..).map(|s| s.0));
                self.pins.clear();
                self.known.clear();
                self.evicted = false;
                self.swapped_in = false;
                for usage in self.cache.usage() {
                    assert_eq!((usage.blocks_used, usage.blocks_cached), (0, 0));
                }
                self.cache.take_events();
            }
            _ => {}
        }
    }

    /// `fits`: check that the rest of the prompt fits if and only if its cost says so.
    fn add(&mut self, prompt: Vec<u32>, n: u8, options: AddOptions, fits: bool) {
        let usage = self.cache.usage();
        let indexed = options.indexed;
        let cost = self.cache.cost(&prompt, &options);
        assert_eq!(self.cache.usage(), usage);
        let best = self.longest_known(n, &prompt, options.read_prefix);
        let added = self.cache.add(&prompt, options).unwrap();
        assert_eq!(cost.cached_tokens, added.cached_tokens);
        assert!(added.cached_tokens < prompt.len());
        // Room for the hits and the block to copy, none of them in use, and for the copy.
        let roomy = |(g, usage): (usize, &candle_paged_attn::cache::GroupUsage)| {
            let held = self.cache.spec().groups[g].blocks_held(best, self.block_size);
            usage.blocks_cached + usage.blocks_free > held
        };
        let full = best - best % self.block_size;
        if !self.evicted && (added.cached_tokens != full || usage.iter().enumerate().all(roomy)) {
            assert_eq!(added.cached_tokens, best, "hits of {prompt:?}");
        }
        for (g, group) in self.cache.spec().groups.iter().enumerate() {
            let held = self.cache.block_table(added.id, g).unwrap().1.len();
            assert_eq!(
                held,
                group.blocks_held(added.cached_tokens, self.block_size)
            );
        }
        if fits {
            let rest = [Feed::new(added.id, &prompt[added.cached_tokens..])];
            assert_eq!(self.cache.plan(&rest).is_ok(), cost.fits());
        }
        let tokens = prompt[..added.cached_tokens].to_vec();
        self.live.push(Naive {
            id: added.id,
            namespace: n,
            indexed,
            tokens,
            prompt,
        });
    }

    /// The most leading tokens of a prompt that anything known shares, at most all but one;
    /// whole blocks of them unless parts can be reused.
    fn longest_known(&self, n: u8, prompt: &[u32], read: bool) -> usize {
        let shared =
            |known: &Vec<u32>| known.iter().zip(prompt).take_while(|(a, b)| a == b).count();
        let known = self.known.iter().filter(|(other, _)| read && *other == n);
        let most = known.map(|(_, tokens)| shared(tokens)).max().unwrap_or(0);
        let most = most.min(prompt.len() - 1);
        match self.switches.sub_block {
            true => most,
            false => most - most % self.block_size,
        }
    }

    fn swap_out(&mut self, pick: usize) {
        let i = pick % self.live.len();
        let id = self.live[i].id;
        let groups = 0..self.cache.spec().groups.len();
        let held = groups.map(|g| self.cache.block_table(id, g).unwrap().1.len());
        let held: Vec<usize> = held.collect();
        let before = (self.tables(), self.cache.usage());
        match self.cache.swap_out(id) {
            Ok(swap) => {
                self.gone.push(id);
                self.swapped.push((swap, self.live.swap_remove(i), held));
                return;
            }
            Err(Error::OutOfBlocks { needed, free, .. }) => assert!(needed > free),
            Err(Error::InvalidArgument { .. }) => assert!(self.switches.host.is_none()),
            Err(other) => panic!("{other}"),
        }
        assert_eq!((self.tables(), self.cache.usage()), before);
        // Sharing only ever takes less than every sequence by itself.
        let alone = |g: usize| held[g] + self.swapped.iter().map(|s| s.2[g]).sum::<usize>();
        let host = self.switches.host.unwrap_or(0);
        assert!(self.switches.host.is_none() || (0..held.len()).any(|g| alone(g) > host));
    }

    fn swap_in(&mut self, pick: usize) {
        let i = pick % self.swapped.len();
        let before = (self.tables(), self.cache.usage());
        match self.cache.swap_in(self.swapped[i].0) {
            Ok(id) => {
                let (swap, mut naive, held) = self.swapped.swap_remove(i);
                for (g, held) in held.iter().enumerate() {
                    assert_eq!(self.cache.block_table(id, g).unwrap().1.len(), *held);
                }
                naive.id = id;
                self.live.push(naive);
                self.spent.push(swap);
                self.swapped_in = true;
            }
            Err(Error::OutOfBlocks { needed, free, .. }) => {
                assert!(needed > free);
                assert_eq!((self.tables(), self.cache.usage()), before);
                let room = before.1.iter().map(|u| u.blocks_cached + u.blocks_free);
                assert!(
                    room.zip(&self.swapped[i].2)
                        .any(|(room, held)| room < *held)
                );
            }
            Err(other) => panic!("{other}"),
        }
    }

    /// Group of a layer, layers and windows being numbered alike.
    fn group(&self, layer: usize) -> usize {
        self.cache
            .spec()
            .groups
            .iter()
            .position(|g| g.layers.contains(&layer))
            .unwrap()
    }

    fn feed(&mut self, picks: &[(usize, usize)], accept: Option<usize>, drop: bool) {
        if self.live.is_empty() {
            return;
        }
        // (index, tokens to feed): the rest of the prompt first, then tokens made up.
        let mut feeds: Vec<(usize, Vec<u32>)> = vec![];
        for &(pick, n) in picks {
            let i = pick % self.live.len();
            if feeds.iter().all(|(other, _)| *other != i) {
                let s = &self.live[i];
                let at = |p: usize| {
                    s.prompt
                        .get(p)
                        .copied()
                        .unwrap_or(7000 + (p * 31 + pick) as u32 % 3)
                };
                feeds.push((i, (s.tokens.len()..s.tokens.len() + n).map(at).collect()));
            }
        }
        let before = (
            self.tables(),
            self.cache.usage(),
            self.cache.counters().copies,
        );
        let request: Vec<_> = feeds
            .iter()
            .map(|(i, t)| Feed::new(self.live[*i].id, t))
            .collect();
        let plan = match self.cache.plan(&request) {
            Ok(plan) => plan,
            Err(Error::OutOfBlocks { needed, free, .. }) => {
                assert!(needed > free);
                assert_eq!(
                    (
                        self.tables(),
                        self.cache.usage(),
                        self.cache.counters().copies
                    ),
                    before
                );
                return;
            }
            Err(other) => panic!("{other}"),
        };
        self.cache.check_invariants().unwrap();
        assert!(matches!(
            self.cache.fork(self.live[0].id),
            Err(Error::PlanOutstanding { .. })
        ));
        let toys: Vec<_> = feeds
            .iter()
            .map(|(i, t)| {
                let mut all = self.live[*i].tokens.clone();
                all.extend(t);
                Toy {
                    seed: self.live[*i].namespace,
                    tokens: all,
                    new: t.len(),
                }
            })
            .collect();
        write_step(&plan, &self.cache, &toys);
        if drop {
            std::mem::drop(plan);
            assert_eq!(self.tables(), before.0);
            return;
        }
        let accepted: Vec<usize> = feeds
            .iter()
            .map(|(_, t)| accept.unwrap_or(99).min(t.len()))
            .collect();
        match accept {
            None => plan.commit().unwrap(),
            Some(_) => plan.commit_accepted(&accepted).unwrap(),
        }
        for ((i, tokens), &n) in feeds.iter().zip(&accepted) {
            let naive = &mut self.live[*i];
            naive.tokens.extend(&tokens[..n]);
            if !naive.indexed {
                continue;
            }
            for end in (1..=naive.tokens.len()).filter(|end| end % self.block_size == 0) {
                self.known
                    .insert((naive.namespace, naive.tokens[..end].to_vec()));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn operations_match_a_naive_model(
        block_size in prop::sample::select(vec![1usize, 2, 4, 8]),
        tokens in 16usize..160,
        windows in prop::sample::select(vec![
            vec![None], vec![None, Some(5)], vec![Some(3)], vec![Some(8), None, Some(8)],
        ]),
        sub_block in any::<bool>(),
        deduplicate in any::<bool>(),
        host in prop::option::weighted(0.8, 1usize..30),
        ops in prop::collection::vec(op(), 1..40),
    ) {
        let switches = Switches { sub_block, deduplicate, host };
        let mut world = World::new(block_size, tokens.div_ceil(block_size), windows, switches);
        for op in &ops {
            world.apply(op);
            world.check();
        }
        for naive in std::mem::take(&mut world.live) {
            world.cache.remove(naive.id).unwrap();
        }
        for pin in std::mem::take(&mut world.pins) {
            world.cache.unpin(pin).unwrap();
        }
        for (swap, _, _) in std::mem::take(&mut world.swapped) {
            world.cache.discard_swap(swap).unwrap();
        }
        world.check();
        for usage in world.cache.usage() {
            prop_assert_eq!(usage.blocks_used, 0);
        }
    }
}
