//! Commented-out code, and marks that say "not finished".

use crate::tidy::File;
use crate::tidy::rust::{Source, line_of, words};

/// Marks in comments, anywhere.
const MARKS: &[&str] = &["FIXME", "XXX"];
/// Marks in code.
const MACROS: &[&str] = &["todo", "dbg"];
/// Files other than Rust that are searched for the marks.
const OTHERS: &[&str] = &["py", "sh", "toml", "cu", "cuh"];

pub(super) fn check(files: &[File]) -> Vec<String> {
    files.iter().flat_map(check_file).collect()
}

fn check_file(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    if file.is_rust() {
        let source = Source::new(&file.text);
        found.extend(marks(&source.with_comments));
        found.extend(macros(&source.code));
        found.extend(commented_code(&source.with_comments));
    } else if file.path.rsplit('.').next().is_some_and(|ending| OTHERS.contains(&ending)) {
        found.extend(marks(&file.text));
    }
    found.into_iter().map(|(line, what)| format!("{}:{line}: {what}", file.path)).collect()
}

fn marks(text: &str) -> Vec<(usize, String)> {
    let found = words(text).filter(|(_, word)| MARKS.contains(word));
    found.map(|(at, word)| (line_of(text, at), format!("leftover {word}"))).collect()
}

fn macros(code: &str) -> Vec<(usize, String)> {
    let called = |at: usize, word: &str| code[at + word.len()..].starts_with('!');
    let found = words(code).filter(|(at, word)| MACROS.contains(word) && called(*at, word));
    found.map(|(at, word)| (line_of(code, at), format!("leftover {word}!"))).collect()
}

/// Two comment lines in a row that end as code does.
fn commented_code(text: &str) -> Vec<(usize, String)> {
    let lines: Vec<bool> = text.lines().map(looks_like_code).collect();
    let starts = (0..lines.len()).filter(|&at| {
        let before = at > 0 && lines[at - 1];
        lines[at] && !before && lines.get(at + 1) == Some(&true)
    });
    starts.map(|at| (at + 1, "commented-out code".to_owned())).collect()
}

fn looks_like_code(line: &str) -> bool {
    let Some(comment) = line.trim().strip_prefix("//") else { return false };
    !comment.starts_with(['/', '!']) && comment.trim_end().ends_with([';', '{', '}'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    #[test]
    fn marks_are_found_as_words_outside_strings() {
        let text = "// XXX: later\nlet a = \"FIXME\"; // mkstemp(XXXXXX)\ndbg!(a);\nlet todo = 1;";
        let found = check(&[file("a.rs", text)]);
        assert_eq!(found, ["a.rs:1: leftover XXX", "a.rs:3: leftover dbg!"]);
        assert_eq!(check(&[file("a.py", "# FIXME")]).len(), 1);
        assert!(check(&[file("a.md", "FIXME")]).is_empty());
    }

    #[test]
    fn two_lines_of_code_in_comments_are_one_finding() {
        let text = "fn f() {\n    // let a = 1;\n    // if a {\n    // }\n}";
        assert_eq!(check(&[file("a.rs", text)]), ["a.rs:2: commented-out code"]);
    }

    #[test]
    fn prose_and_documentation_are_not_code() {
        let text = "// The word is zero at rest;\n// whoever waits sets it.\n/// let a = 1;\n/// let b = 2;";
        assert!(check(&[file("a.rs", text)]).is_empty());
    }
}
