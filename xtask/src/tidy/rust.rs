//! Just enough of Rust's grammar: text without strings or comments, functions, test modules, `use` trees.

use std::ops::Range;

/// A source text twice, each as long as the source and with the same lines.
pub(crate) struct Source {
    /// Strings and comments are blank.
    pub(crate) code: String,
    /// Strings are blank.
    pub(crate) with_comments: String,
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Code,
    Comment,
    Literal,
}

impl Source {
    pub(crate) fn new(text: &str) -> Self {
        let bytes = text.as_bytes();
        let mut kinds = vec![Kind::Code; bytes.len()];
        let mut at = 0;
        while at < bytes.len() {
            let (kind, end) = token(bytes, at);
            kinds[at..end].fill(kind);
            at = end;
        }
        let keep = |wanted: fn(Kind) -> bool| {
            let kept = bytes.iter().zip(&kinds).map(|(&byte, &kind)| match byte {
                b'\n' => '\n',
                byte if wanted(kind) && byte.is_ascii() => char::from(byte),
                _ => ' ',
            });
            kept.collect()
        };
        Self {
            code: keep(|kind| kind == Kind::Code),
            with_comments: keep(|kind| kind != Kind::Literal),
        }
    }

    /// The code with test modules blanked as well.
    pub(crate) fn without_tests(&self) -> String {
        let mut bytes = self.code.clone().into_bytes();
        for range in self.test_modules() {
            bytes[range].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The byte ranges of `#[cfg(test)] mod name { ... }`.
    pub(crate) fn test_modules(&self) -> Vec<Range<usize>> {
        let found = self.code.match_indices("#[cfg(test)]").filter_map(|(at, attribute)| {
            let rest = self.code[at + attribute.len()..].trim_start();
            let start = self.code.len() - rest.len();
            rest.strip_prefix("mod ")?;
            let open = start + rest.find(['{', ';'])?;
            Some(at..closing(&self.code, open)?)
        });
        found.collect()
    }

    /// Each function with a body: name, and the byte range from `fn` to its closing brace.
    pub(crate) fn functions(&self) -> Vec<(&str, Range<usize>)> {
        let starts = words(&self.code).filter(|(_, word)| *word == "fn");
        let found = starts.filter_map(|(at, _)| {
            let rest = &self.code[at + 2..];
            let name = rest.trim_start().split(|c: char| !is_word(c)).next()?;
            let open = at + 2 + body_start(rest)?;
            (!name.is_empty()).then_some(())?;
            Some((name, at..closing(&self.code, open)?))
        });
        found.collect()
    }
}

/// The token at `at`: its kind and where it ends.
fn token(bytes: &[u8], at: usize) -> (Kind, usize) {
    let rest = &bytes[at..];
    let word_before = at > 0 && is_word(char::from(bytes[at - 1]));
    if rest.starts_with(b"//") {
        let length = rest.iter().position(|&byte| byte == b'\n').unwrap_or(rest.len());
        return (Kind::Comment, at + length);
    }
    if rest.starts_with(b"/*") {
        return (Kind::Comment, at + block_comment(rest));
    }
    if rest[0] == b'"' {
        return (Kind::Literal, at + quoted(rest));
    }
    let may_be_raw = rest[0] == b'r' && (!word_before || matches!(bytes[at - 1], b'b' | b'c'));
    let literal = match rest[0] {
        b'r' if may_be_raw => raw_string(rest),
        b'\'' => char_literal(rest),
        _ => None,
    };
    if let Some(length) = literal {
        return (Kind::Literal, at + length);
    }
    (Kind::Code, at + 1)
}

fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        match rest.get(at..at + 2) {
            Some(b"/*") => (depth, at) = (depth + 1, at + 2),
            Some(b"*/") if depth == 1 => return at + 2,
            Some(b"*/") => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
    }
    rest.len()
}

fn quoted(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() {
        match rest[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    rest.len()
}

fn raw_string(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|&&byte| byte == b'#').count();
    let body = rest.get(1 + hashes..)?.strip_prefix(b"\"")?;
    let end = [b"\"".as_slice(), &b"#".repeat(hashes)].concat();
    let length = body.windows(end.len()).position(|window| window == end)?;
    Some(rest.len() - body.len() + length + end.len())
}

/// The length of `'x'` or `'\n'`; none for a lifetime.
fn char_literal(rest: &[u8]) -> Option<usize> {
    if rest.get(1) == Some(&b'\\') {
        let end = rest[3.min(rest.len())..].iter().position(|&byte| byte == b'\'')?;
        return Some(3 + end + 1);
    }
    let character = std::str::from_utf8(&rest[1..rest.len().min(5)]);
    let valid = match character {
        Ok(text) => text,
        Err(error) => std::str::from_utf8(&rest[1..1 + error.valid_up_to()]).ok()?,
    };
    let length = valid.chars().next()?.len_utf8();
    (rest.get(1 + length) == Some(&b'\'')).then_some(length + 2)
}

/// Where the body of a function begins; none if it has no body.
fn body_start(rest: &str) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in rest.char_indices() {
        match c {
            '(' | '[' => depth += 1,
            ')' | ']' if depth == 0 => return None,
            ')' | ']' => depth -= 1,
            '{' if depth == 0 => return Some(at),
            ';' | ',' | '=' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// Behind the brace that closes the one at `open`.
fn closing(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0;
    for (at, c) in code[open..].char_indices() {
        match c {
            '{' => depth += 1,
            '}' if depth == 1 => return Some(open + at + 1),
            '}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// The words of a text with their places.
pub(crate) fn words(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let split = text.split(|c: char| !is_word(c)).filter(|word| !word.is_empty());
    split.map(|word| (word.as_ptr() as usize - text.as_ptr() as usize, word))
}

pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The number of the line that `at` lies in, from 1.
pub(crate) fn line_of(text: &str, at: usize) -> usize {
    text.as_bytes()[..at].iter().filter(|&&byte| byte == b'\n').count() + 1
}

/// The paths that a `use` tree such as `a::{b, c::d as e}` names.
pub(crate) fn use_paths(tree: &str) -> Vec<String> {
    let tree = tree.trim();
    let Some(open) = tree.find('{') else {
        let path = tree.split(" as ").next().unwrap_or(tree);
        return vec![path.split_whitespace().collect()];
    };
    let prefix: String = tree[..open].split_whitespace().collect();
    let inside = tree[open + 1..].trim_end().strip_suffix('}').unwrap_or(&tree[open + 1..]);
    let branches = split_at_commas(inside).into_iter().flat_map(use_paths);
    branches.filter(|path| !path.is_empty()).map(|path| format!("{prefix}{path}")).collect()
}

fn split_at_commas(text: &str) -> Vec<&str> {
    let (mut depth, mut start, mut parts) = (0, 0, Vec::new());
    for (at, c) in text.char_indices() {
        match c {
            '{' => depth += 1,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(&text[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    parts.push(&text[start..]);
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_and_comments_are_blanked_and_lines_kept() {
        let text = "let a = \"x{\\\"\"; // {\nlet b = r#\"\"}\"#; /* { /* } */ */ let c = '{';";
        let source = Source::new(text);
        assert_eq!(source.code.len(), text.len());
        assert_eq!(source.code.matches(['{', '}']).count(), 0);
        assert!(source.with_comments.contains("// {\n"));
        assert!(source.code.contains("let c ="));
    }

    #[test]
    fn lifetimes_are_not_characters() {
        let source = Source::new("fn f<'a>(x: &'a str) -> char { 'ß' } fn g() { b'\\'' }");
        let names: Vec<_> = source.functions().iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["f", "g"]);
        assert!(!source.code.contains('\u{df}'));
    }

    #[test]
    fn functions_without_a_body_do_not_count() {
        let source = Source::new("trait T { fn a(&self); fn b() {} } type F = fn(u8) -> u8;");
        let found = source.functions();
        assert_eq!(found.len(), 1);
        assert_eq!(&source.code[found[0].1.clone()], "fn b() {}");
    }

    #[test]
    fn test_modules_are_found_to_their_end() {
        let source = Source::new("a\n#[cfg(test)]\nmod tests {\n fn x() {}\n}\nb");
        let code = source.without_tests();
        assert_eq!(code.split_whitespace().collect::<String>(), "ab");
        assert_eq!(code.lines().count(), 6);
    }

    #[test]
    fn use_trees_are_expanded() {
        let paths = use_paths("crate::{a, b::{self, c as d},\n e::F}");
        assert_eq!(paths, ["crate::a", "crate::b::self", "crate::b::c", "crate::e::F"]);
    }
}
