//! The licences of the packages that this repository uses: each is satisfied by those that `deny.toml` allows.

use anyhow::{Context, Result, bail};

use crate::command::{cargo, output, root};
use crate::{Arguments, Outcome};

const LIST: &str = "deny.toml";

/// Looks at every package in the lock file, whatever target or test it is for.
pub(crate) fn deny(arguments: Arguments) -> Result<Outcome> {
    arguments.finish()?;
    let text = std::fs::read_to_string(root().join(LIST)).context("no deny.toml")?;
    let allowed = allowed(&text)?;
    let mut tree = cargo(["tree", "--workspace", "--all-features", "--target", "all"]);
    tree.args(["--edges", "all", "--prefix", "none", "--no-dedupe", "--format", "{p}\t{l}"]);
    let said = output(&mut tree)?;
    // A cycle, which tests may have, ends in a star.
    let lines = said.lines().map(|line| line.trim_end_matches(" (*)"));
    let mut packages: Vec<_> = lines.filter_map(|line| line.split_once('\t')).collect();
    packages.sort_unstable();
    packages.dedup();
    let refused = packages.iter().filter(|(_, licence)| !is_satisfied(licence, &allowed));
    let refused: Vec<_> = refused.map(|(name, licence)| format!("{name}: {licence:?}")).collect();
    if !refused.is_empty() {
        bail!("licences that {LIST} does not allow:\n{}", refused.join("\n"));
    }
    println!("{} packages, {} licences", packages.len(), allowed.len());
    Ok(Outcome::Done)
}

/// The licences between `allow = [` and `]`.
fn allowed(text: &str) -> Result<Vec<&str>> {
    let (_, rest) =
        text.split_once("\nallow = [").with_context(|| format!("{LIST} allows nothing"))?;
    let (list, _) =
        rest.split_once(']').with_context(|| format!("{LIST} has a list without an end"))?;
    Ok(list.split('"').skip(1).step_by(2).collect())
}

/// Whether the expression holds if only the allowed licences do. `OR` binds less than `AND`; before SPDX, a slash was `OR`.
fn is_satisfied(expression: &str, allowed: &[&str]) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let words: Vec<_> = spaced.split_whitespace().collect();
    let mut parser = Parser { words: &words, allowed };
    parser.any().is_some_and(|holds| holds && parser.words.is_empty())
}

struct Parser<'a> {
    words: &'a [&'a str],
    allowed: &'a [&'a str],
}

impl Parser<'_> {
    fn any(&mut self) -> Option<bool> {
        let mut holds = self.all()?;
        while self.take("OR") {
            holds |= self.all()?;
        }
        Some(holds)
    }

    fn all(&mut self) -> Option<bool> {
        let mut holds = self.one()?;
        while self.take("AND") {
            holds &= self.one()?;
        }
        Some(holds)
    }

    fn one(&mut self) -> Option<bool> {
        if self.take("(") {
            let holds = self.any()?;
            return self.take(")").then_some(holds);
        }
        let mut name = self.word()?.to_owned();
        if self.take("WITH") {
            name = format!("{name} WITH {}", self.word()?);
        }
        Some(self.allowed.contains(&name.as_str()))
    }

    fn take(&mut self, word: &str) -> bool {
        let found = self.words.first() == Some(&word);
        self.words = if found { &self.words[1..] } else { self.words };
        found
    }

    fn word(&mut self) -> Option<&str> {
        let (first, rest) = self.words.split_first()?;
        self.words = rest;
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALLOWED: &[&str] = &["MIT", "Apache-2.0", "Apache-2.0 WITH LLVM-exception"];

    #[test]
    fn one_of_several_is_enough() {
        assert!(is_satisfied("MIT", ALLOWED));
        assert!(is_satisfied("GPL-3.0 OR MIT", ALLOWED));
        assert!(is_satisfied("Unlicense/MIT", ALLOWED));
        assert!(is_satisfied("Apache-2.0 WITH LLVM-exception OR GPL-3.0", ALLOWED));
        assert!(!is_satisfied("GPL-3.0", ALLOWED));
        assert!(!is_satisfied("MIT WITH GPL-exception", ALLOWED));
    }

    #[test]
    fn all_of_several_must_be_allowed() {
        assert!(is_satisfied("(MIT OR GPL-3.0) AND Apache-2.0", ALLOWED));
        assert!(!is_satisfied("(MIT OR Apache-2.0) AND NCSA", ALLOWED));
        assert!(!is_satisfied("NCSA AND MIT OR GPL-3.0", ALLOWED));
        assert!(is_satisfied("NCSA AND GPL-3.0 OR MIT", ALLOWED));
    }

    #[test]
    fn what_is_no_expression_is_not_met() {
        assert!(
            !["", "(MIT", "MIT)", "MIT MIT", "OR"].iter().any(|text| is_satisfied(text, ALLOWED))
        );
    }

    #[test]
    fn the_list_is_read() {
        assert_eq!(
            allowed("x\nallow = [\n  \"MIT\",\n  \"A WITH B\",\n]\n").unwrap(),
            ["MIT", "A WITH B"]
        );
        assert!(allowed("x").is_err());
    }
}
