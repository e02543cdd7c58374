//! Prompts of any length: numbered lines of English, which the model continues with confidence,
//! so that both sides must answer with the same tokens.

use anyhow::{Result, ensure};
use candle_paged_attn::load::Pretrained;

/// `len` tokens; different `topic`s give different texts.
pub fn tokens(pretrained: &Pretrained, len: usize, topic: usize) -> Result<Vec<u32>> {
    const TOPICS: [&str; 8] = [
        "rivers",
        "bridges",
        "clocks",
        "gardens",
        "ships",
        "kitchens",
        "mountains",
        "letters",
    ];
    let topic = TOPICS[topic % TOPICS.len()];
    // No line gives fewer than 8 tokens.
    let text: String = (1..=len.div_ceil(8))
        .map(|line| format!("Note {line}: we wrote down what is known about {topic}.\n"))
        .collect();
    let encoding = pretrained
        .tokenizer
        .encode(text, false)
        .map_err(anyhow::Error::msg)?;
    let mut ids = encoding.get_ids().to_vec();
    ensure!(ids.len() >= len, "a prompt of {} tokens only", ids.len());
    ids.truncate(len);
    Ok(ids)
}
