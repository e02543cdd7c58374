//! Chat templates against text written by hand.

use candle_core::quantized::gguf_file::Value;
use candle_paged_attn::{
    Error,
    load::{
        chat::{ChatTemplate, Message},
        gguf::GgufFile,
    },
};
use serde_json::json;

use crate::tiny;

/// As in SmolLM2-135M-Instruct.
const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

/// In the manner of Llama 3: indented blocks, a date, roles checked.
const LLAMA3: &str = r"{{- bos_token }}
{%- if tools is not none %}
    {{- raise_exception('no tools here') }}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

Today Date: {{ strftime_now('%d %b %Y') }}

{{ system_message }}<|eot_id|>
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
";

fn message(role: &str, content: &str) -> Message {
    Message::new(role, content)
}

fn render(template: &str, messages: &[Message], prompt: bool) -> String {
    ChatTemplate::new(template, "<s>", "</s>")
        .unwrap()
        .render(messages, prompt)
        .unwrap()
}

#[test]
fn chatml_with_its_default_system_prompt() {
    assert_eq!(
        render(CHATML, &[message("user", "Hi")], true),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face\
         <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    );
    let conversation = [
        message("system", "Be brief."),
        message("user", "1 < 2 & 'x'?"),
        message("assistant", "Yes.\n"),
    ];
    assert_eq!(
        render(CHATML, &conversation, false),
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 < 2 & 'x'?<|im_end|>\n\
         <|im_start|>assistant\nYes.\n<|im_end|>\n"
    );
}

#[test]
fn a_llama_3_template() {
    let conversation = [
        message("system", "  Be brief.\n"),
        message("user", "Hi "),
        message("assistant", "Ho"),
        message("user", "?"),
    ];
    let text = render(LLAMA3, &conversation, true);
    let (before, rest) = text.split_once("Today Date: ").unwrap();
    let (date, after) = rest.split_once("\n\n").unwrap();
    assert_eq!(before, "<s><|start_header_id|>system<|end_header_id|>\n\n");
    // Two digits, a month of three letters, a year.
    let parts: Vec<&str> = date.split(' ').collect();
    assert_eq!(
        parts.iter().map(|p| p.len()).collect::<Vec<_>>(),
        [2, 3, 4],
        "{date}"
    );
    assert!(parts[2].parse::<u32>().unwrap() >= 2024, "{date}");
    assert_eq!(
        after,
        "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\nHo<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\n?<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
}

#[test]
fn blocks_are_trimmed_as_transformers_sets_it() {
    // Jinja2 with trim_blocks and lstrip_blocks: the lines of the tags leave nothing behind.
    let template = "a\n  {% if true %}\nb\n  {% endif %}\nc\n";
    assert_eq!(render(template, &[], false), "a\nb\nc");
    let breaks =
        "{% for i in [1, 2, 3] %}{% if i == 2 %}{% continue %}{% endif %}{{ i }}{% endfor %}";
    assert_eq!(render(breaks, &[], false), "13");
}

#[test]
fn json_as_python_writes_it() {
    // json.dumps([{"content": "<é> & 'x'", "role": "user"}], ensure_ascii=False)
    let template = "{{ messages | tojson }}";
    let messages = [message("user", "<é> & 'x'\n")];
    let text = render(template, &messages, false);
    let (role, content) = (r#""role": "user""#, r#""content": "<é> & 'x'\n""#);
    assert!(
        text == format!("[{{{role}, {content}}}]") || text == format!("[{{{content}, {role}}}]"),
        "{text}"
    );
    assert_eq!(
        render("{{ [1, {'a': none}] | tojson(indent=2) }}", &[], false),
        "[\n  1,\n  {\n    \"a\": null\n  }\n]"
    );
}

/// A template comes with a model file: it must not take the process down or keep it forever.
#[test]
fn hostile_templates_are_errors() {
    let endless = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(endless, "", "").unwrap();
    assert!(matches!(
        template.render(&[], true),
        Err(Error::Template(_))
    ));
    let long = "x".repeat(65_537);
    let error = ChatTemplate::new(&long, "", "").unwrap_err();
    assert!(error.to_string().contains("65537"), "{error}");
    // Lists in lists, as deep as the fuel allows, only to be dropped or to be walked through.
    let in_lists = |by: &str, count: usize, then: &str| {
        let template = format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range({count}) %}}\
             {{% set ns.x = {by} %}}{{% endfor %}}{{{{ {then} }}}}"
        );
        let template = ChatTemplate::new(&template, "", "").unwrap();
        template.render(&[], true)
    };
    assert_eq!(in_lists("[ns.x]", 100_000, "1").unwrap(), "1");
    let many = format!("{}ns.x{}", "[".repeat(60), "]".repeat(60));
    assert!(in_lists(&many, 100_000, "1").is_err());
    for walk in ["ns.x", "ns.x|tojson", "ns.x == [ns.x]"] {
        assert!(in_lists("[ns.x]", 100_000, walk).is_ok(), "{walk}");
        let _either = in_lists(&many, 5_000, walk);
    }
    for (by, count) in [("[ns.x]", 100_000), ("[ns.x, ns.x]", 40)] {
        let json = in_lists(by, count, "ns.x|tojson(indent=16)").unwrap_err();
        assert!(json.to_string().contains("16777216 bytes"), "{json}");
    }
    // Nesting as deep as the size allows either parses or is refused.
    for (open, inner) in [("not ", "true"), ("-", "1"), ("[", "1"), ("(", "1")] {
        let deep = format!("{{{{ {}{inner} }}}}", open.repeat(65_000 / open.len()));
        if let Ok(template) = ChatTemplate::new(&deep, "", "") {
            let _ = template.render(&[], true);
        }
    }
}

/// As SmolLM3 marks the text to train on; transformers renders what is between the tags.
#[test]
fn generation_tags_are_left_out() {
    let template = "a\n  {% generation %}\n b {%- endgeneration -%}\n c\n{%-generation-%} d {%endgeneration%}e";
    assert_eq!(render(template, &[], false), "a\n bcd e");
    let loose = ChatTemplate::new("{% generation %}", "", "");
    assert!(matches!(loose, Err(Error::Template(_))), "{loose:?}");
}

#[test]
fn template_errors_are_typed_and_carry_the_message() {
    let error = ChatTemplate::new("{% for %}", "", "").unwrap_err();
    assert!(matches!(error, Error::Template(_)), "{error}");
    let template = ChatTemplate::new(LLAMA3, "", "").unwrap();
    let error = template.render(&[message("poet", "x")], true).unwrap_err();
    assert!(
        matches!(&error, Error::Template(text) if text.contains("unknown role poet")),
        "{error}"
    );
    let unknown = ChatTemplate::new("{{ nothing_like_it() }}", "", "").unwrap();
    assert!(matches!(unknown.render(&[], true), Err(Error::Template(_))));
    let date = ChatTemplate::new("{{ strftime_now('%Q') }}", "", "").unwrap();
    let error = date.render(&[], true).unwrap_err();
    assert!(error.to_string().contains("%Q"), "{error}");
}

#[test]
fn from_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let find = || ChatTemplate::from_folder(folder.path());
    let text = || find().unwrap().unwrap().render(&[], false).unwrap();
    let config = |config: serde_json::Value| {
        tiny::write(folder.path(), "tokenizer_config.json", config.to_string())
    };
    assert!(find().unwrap().is_none());
    config(json!({ "bos_token": "<s>" }));
    assert!(find().unwrap().is_none());
    config(
        json!({ "bos_token": "<s>", "eos_token": null, "chat_template": "A{{ bos_token }}{{ eos_token }}" }),
    );
    assert_eq!(text(), "A<s>");
    config(json!({
        "eos_token": { "content": "</s>", "lstrip": false },
        "chat_template": [
            { "name": "tool_use", "template": "T" },
            { "name": "default", "template": "D{{ eos_token }}" },
        ],
    }));
    assert_eq!(text(), "D</s>");
    tiny::write(folder.path(), "chat_template.jinja", "F{{ eos_token }}");
    assert_eq!(text(), "F</s>");

    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    for bad in [
        json!({ "chat_template": 1 }),
        json!({ "chat_template": [{ "name": "tool_use", "template": "T" }] }),
    ] {
        let path = config(bad);
        crate::assert_blames(&find().unwrap_err(), &path);
    }
    for name in ["tokenizer_config.json", "chat_template.jinja"] {
        let bad = match name {
            "chat_template.jinja" => "{% for %}",
            _ => r#"{ "chat_template": "{% for %}" }"#,
        };
        let path = tiny::write(folder.path(), name, bad).display().to_string();
        let error = find().unwrap_err();
        assert!(
            matches!(&error, Error::Template(what) if what.ends_with(&path)),
            "{error}"
        );
    }
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let path = tiny::write(folder.path(), "tokenizer_config.json", "{");
    crate::assert_blames(&find().unwrap_err(), &path);
}

#[test]
fn from_a_gguf() {
    let folder = tempfile::tempdir().unwrap();
    let mut metadata = tiny::tokenizer_metadata("smollm");
    let open = |metadata: &_| {
        let path = tiny::write(folder.path(), "t.gguf", tiny::gguf_bytes(metadata, &[]));
        ChatTemplate::from_gguf(&GgufFile::open(path).unwrap())
    };
    assert!(open(&metadata).unwrap().is_none());
    let key = "tokenizer.chat_template".to_string();
    metadata.insert(key.clone(), Value::String("{% for %}".into()));
    let error = open(&metadata).unwrap_err();
    assert!(error.to_string().ends_with("t.gguf"), "{error}");
    metadata.insert(key, Value::String("{{ bos_token }}!".into()));
    let text = open(&metadata)
        .unwrap()
        .unwrap()
        .render(&[], false)
        .unwrap();
    assert_eq!(text, "<|bos|>!");
    metadata.insert("tokenizer.ggml.bos_token_id".into(), Value::U32(9999));
    assert!(matches!(open(&metadata), Err(Error::Format { .. })));
}
