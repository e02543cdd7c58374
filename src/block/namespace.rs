//! What besides tokens decides whether two prompts may share K/V.

use std::sync::Arc;

/// The part of a prefix's identity that its tokens do not tell.
///
/// Each reason to keep K/V apart has its own typed field; two namespaces are equal only when
/// every field is. A joined string would let `("a", "bc")` meet `("ab", "c")`, and an adapter
/// meet a tenant of the same name (vLLM issue 44701). The default has no field set.
///
/// Cloning is O(1): the fields are shared.
///
/// ```
/// # use candle_paged_attn::block::Namespace;
/// let plain = Namespace::default();
/// let tuned = Namespace::default().with_adapter("sql", 3).with_salt("tenant-7");
/// assert_ne!(plain, tuned);
/// assert_ne!(tuned, tuned.clone().with_adapter("sql", 4));
/// ```
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub struct Namespace(Option<Arc<Fields>>);

#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
struct Fields {
    adapter: Option<(String, u64)>,
    salt: Option<Salt>,
    content: Option<u64>,
}

#[derive(Clone, PartialEq, Eq, Hash)]
struct Salt(Vec<u8>);

impl std::fmt::Debug for Salt {
    // Not derived: a salt may be a secret of its tenant, and requests are logged.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Salt(..)")
    }
}

impl Namespace {
    /// K/V computed with an adapter (LoRA) of this name and version: a new version of the
    /// same adapter shares nothing with the old one.
    pub fn with_adapter(self, name: impl Into<String>, version: u64) -> Self {
        self.with(|fields| fields.adapter = Some((name.into(), version)))
    }

    /// K/V that only holders of the salt (a tenant, a session) may share. An empty salt is a
    /// salt: it differs from none. `Debug` shows only that there is one.
    pub fn with_salt(self, salt: impl Into<Vec<u8>>) -> Self {
        self.with(|fields| fields.salt = Some(Salt(salt.into())))
    }

    /// K/V of embeddings (an image, audio) that tokens stand in for, named by a key of their
    /// content. The caller chooses a key that does not collide.
    pub fn with_content(self, key: u64) -> Self {
        self.with(|fields| fields.content = Some(key))
    }

    fn with(mut self, set: impl FnOnce(&mut Fields)) -> Self {
        set(Arc::make_mut(self.0.get_or_insert_default()));
        self
    }
}
