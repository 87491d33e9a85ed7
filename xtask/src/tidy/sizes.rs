//! Functions and files stay short enough to be read at once.

use crate::tidy::File;
use crate::tidy::rust::{Source, line_of};

const FUNCTION_LINES: usize = 80;
const FILE_LINES: usize = 500;
const SOURCES: &[&str] = &["rs", "py", "cu", "cuh"];

pub(super) fn check(files: &[File]) -> Vec<String> {
    let rust = files.iter().filter(|file| file.is_rust()).flat_map(long_functions);
    rust.chain(files.iter().filter_map(long_file)).collect()
}

fn long_functions(file: &File) -> Vec<String> {
    let source = Source::new(&file.text);
    let measured = source.functions().into_iter().map(|(name, range)| {
        let lines = source.code[range.clone()].lines().count();
        (name, line_of(&source.code, range.start), lines)
    });
    let long = measured.filter(|&(_, _, lines)| lines > FUNCTION_LINES);
    let say = |(name, line, lines)| {
        format!("{}:{line}: fn {name} has {lines} lines, limit {FUNCTION_LINES}", file.path)
    };
    long.map(say).collect()
}

fn long_file(file: &File) -> Option<String> {
    let ending = file.path.rsplit('.').next()?;
    if !SOURCES.contains(&ending) || file.is_test() {
        return None;
    }
    let lines = file.text.lines().count() - if file.is_rust() { test_lines(&file.text) } else { 0 };
    (lines > FILE_LINES)
        .then(|| format!("{}: {lines} lines without tests, limit {FILE_LINES}", file.path))
}

/// Lines inside test modules.
fn test_lines(text: &str) -> usize {
    let source = Source::new(text);
    source.test_modules().into_iter().map(|range| source.code[range].lines().count()).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    #[test]
    fn a_function_of_81_lines_is_too_long() {
        let body = |lines: usize| format!("\nfn f() {{\n{}}}\n", "x();\n".repeat(lines - 2));
        assert!(check(&[file("a.rs", &body(80))]).is_empty());
        assert_eq!(check(&[file("a.rs", &body(81))]), ["a.rs:2: fn f has 81 lines, limit 80"]);
    }

    #[test]
    fn tests_do_not_count_for_the_size_of_a_file() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "const A: u8 = 0;\n".repeat(600));
        assert!(check(&[file("a.rs", &tests)]).is_empty());
        assert!(check(&[file("crates/x/tests/a.rs", &"//\n".repeat(600))]).is_empty());
        assert_eq!(check(&[file("a.rs", &"//\n".repeat(501))]).len(), 1);
        assert_eq!(check(&[file("a.cu", &"//\n".repeat(501))]).len(), 1);
    }
}
