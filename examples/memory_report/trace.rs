//! Requests: from a trace file, or made up.

use std::fs::File;
use std::io::{BufRead, BufReader};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::Deserialize;

/// Tokens that one of Mooncake's `hash_ids` stands for.
const MOONCAKE_BLOCK: usize = 512;

/// A request: how long its prompt and its answer are, and if known what the prompt says.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    pub prompt: usize,
    pub output: usize,
    /// One id for each `Trace::tokens_per_id` tokens of the prompt, the last ones may be fewer.
    /// Equal ids stand for equal tokens.
    pub content: Option<Vec<u32>>,
}

impl Request {
    /// Tokens when it is done.
    pub fn total(&self) -> usize {
        self.prompt + self.output
    }
}

/// Requests in the order of their arrival.
#[derive(Debug, Clone, PartialEq)]
pub struct Trace {
    pub name: String,
    pub requests: Vec<Request>,
    pub tokens_per_id: usize,
}

impl Trace {
    /// Tokens of the longest request.
    pub fn longest(&self) -> usize {
        self.requests.iter().map(Request::total).max().unwrap_or(0)
    }

    /// Whether prompts can be compared: without their content nothing is known to be shared.
    pub fn has_content(&self) -> bool {
        self.requests
            .iter()
            .any(|request| request.content.is_some())
    }

    /// The first `limit` requests.
    pub fn truncate(&mut self, limit: usize) {
        self.requests.truncate(limit);
    }

    /// Reads a trace, line by line. `*.csv`: columns `ContextTokens` and `GeneratedTokens`
    /// (Azure); `*.jsonl`: objects with `input_length`, `output_length` and perhaps `hash_ids`
    /// (Mooncake).
    pub fn read(path: &Path) -> Result<Self> {
        let place = path.display();
        let extension = path.extension().unwrap_or_default().to_string_lossy();
        let mut parser = match extension.to_ascii_lowercase().as_str() {
            "csv" => Parser::Csv(None),
            "jsonl" => Parser::Json,
            other => bail!("{place}: expected a file *.csv or *.jsonl, got \"{other}\""),
        };
        let file = File::open(path).with_context(|| format!("cannot read {place}"))?;
        let mut requests = Vec::new();
        for (number, line) in (1..).zip(BufReader::new(file).lines()) {
            let request = line.map_err(anyhow::Error::from);
            let request = request.and_then(|line| parser.line(line.trim_end()));
            requests.extend(request.with_context(|| format!("{place}, line {number}"))?);
        }
        ensure!(!requests.is_empty(), "{place}: no request in it");
        Ok(Self {
            name: path
                .file_name()
                .unwrap_or_default()
                .to_string_lossy()
                .into(),
            requests,
            tokens_per_id: MOONCAKE_BLOCK,
        })
    }

    /// 3,000 made-up requests: each begins with one of 8 system prompts of 256 to 1,536
    /// tokens, the popular ones far more often, then asks something of its own. Lengths have
    /// the long tails of real traces. Always the same; taken from nowhere.
    pub fn synthetic() -> Self {
        const TOKENS_PER_ID: usize = 16;
        let mut rng = StdRng::seed_from_u64(20_231_116);
        // Log-uniform: as many from 16 to 32 as from 1,024 to 2,048.
        let length = |rng: &mut StdRng, from: f64, to: f64| {
            (from * (to / from).powf(rng.random::<f64>())) as usize
        };
        let systems: Vec<usize> = (0..8).map(|_| rng.random_range(16..=96)).collect();
        let mut next = 0;
        let mut take = |ids: usize| {
            next += ids as u32;
            next - ids as u32..next
        };
        let systems: Vec<_> = systems.into_iter().map(&mut take).collect();
        let requests = (0..3000).map(|_| {
            let popularity = rng.random::<f64>() * rng.random::<f64>();
            let system = systems[(popularity * systems.len() as f64) as usize].clone();
            let own = length(&mut rng, 16.0, 2048.0);
            let output = length(&mut rng, 16.0, 1024.0);
            Request {
                prompt: system.len() * TOKENS_PER_ID + own,
                output,
                content: Some(system.chain(take(own.div_ceil(TOKENS_PER_ID))).collect()),
            }
        });
        let requests = requests.collect();
        Self {
            name: "synthetic".into(),
            requests,
            tokens_per_id: TOKENS_PER_ID,
        }
    }
}

/// Where the two columns are, once the header is known.
enum Parser {
    Csv(Option<(usize, usize)>),
    Json,
}

#[derive(Deserialize)]
struct JsonLine {
    input_length: usize,
    output_length: usize,
    hash_ids: Option<Vec<u32>>,
}

impl Parser {
    /// The request of a line; none in a header or an empty line.
    fn line(&mut self, line: &str) -> Result<Option<Request>> {
        if line.is_empty() {
            return Ok(None);
        }
        let request = match self {
            Self::Csv(None) => {
                let column = |name: &str| {
                    let mut columns = line.split(',');
                    let place = columns.position(|column| column.trim() == name);
                    place.with_context(|| format!("expected a column {name}, got \"{line}\""))
                };
                *self = Self::Csv(Some((column("ContextTokens")?, column("GeneratedTokens")?)));
                return Ok(None);
            }
            Self::Csv(Some((prompt, output))) => {
                let number = |name: &str, place: usize| {
                    let field = line.split(',').nth(place);
                    let field = field.with_context(|| format!("{name}: the line is too short"))?;
                    let number = field.trim().parse::<usize>();
                    number.with_context(|| format!("{name}: expected a number, got \"{field}\""))
                };
                Request {
                    prompt: number("ContextTokens", *prompt)?,
                    output: number("GeneratedTokens", *output)?,
                    content: None,
                }
            }
            Self::Json => {
                let line: JsonLine = serde_json::from_str(line)?;
                Request {
                    prompt: line.input_length,
                    output: line.output_length,
                    content: line.hash_ids,
                }
            }
        };
        ensure!(
            request.prompt > 0,
            "expected a prompt of at least one token"
        );
        // Far above any context length; sums over a trace stay exact.
        let most = 1 << 30;
        for tokens in [request.prompt, request.output] {
            ensure!(
                tokens <= most,
                "expected at most {most} tokens, got {tokens}"
            );
        }
        if let Some(ids) = &request.content {
            let expected = request.prompt.div_ceil(MOONCAKE_BLOCK);
            ensure!(
                ids.len() == expected,
                "a prompt of {} tokens has {expected} hash_ids, one for {MOONCAKE_BLOCK} tokens; \
                 got {}",
                request.prompt,
                ids.len()
            );
        }
        Ok(Some(request))
    }
}
