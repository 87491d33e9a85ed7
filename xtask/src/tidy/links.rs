//! Relative links in Markdown lead somewhere.

use std::path::Path;

use crate::command::root;
use crate::tidy::File;

pub(super) fn check(files: &[File]) -> Vec<String> {
    let pages = files.iter().filter(|file| file.path.ends_with(".md"));
    pages.flat_map(|page| broken(page, &|path| root().join(path).exists())).collect()
}

fn broken(page: &File, exists: &dyn Fn(&Path) -> bool) -> Vec<String> {
    let directory = Path::new(&page.path).parent().unwrap_or(Path::new(""));
    let wrong = links(&page.text).into_iter().filter(|(_, target)| {
        let path = target.split('#').next().unwrap_or("");
        !path.is_empty() && !path.contains(':') && !exists(&directory.join(path))
    });
    wrong.map(|(line, target)| format!("{}:{line}: broken link {target}", page.path)).collect()
}

/// The targets of `[text](target)` and `[name]: target` outside code, with their lines.
fn links(text: &str) -> Vec<(usize, String)> {
    let (mut found, mut in_code) = (Vec::new(), false);
    for (number, line) in text.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            in_code = !in_code;
        }
        if in_code {
            continue;
        }
        let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`");
        let inline = prose.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
        let definition = prose.strip_prefix('[').and_then(|rest| rest.split_once("]: "));
        let targets = inline.chain(definition.map(|(_, target)| target.trim()));
        found.extend(targets.map(|target| (number + 1, target.to_owned())));
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::file;

    #[test]
    fn only_relative_links_that_lead_nowhere_are_broken() {
        let text =
            "[a](b.md) [c](gone.md#x) [d](#here) [e](https://example.org/x)\n\n[f]: gone.md\n";
        let page = file("docs/page.md", text);
        let found = broken(&page, &|path| path == Path::new("docs/b.md"));
        let wanted =
            ["docs/page.md:1: broken link gone.md#x", "docs/page.md:3: broken link gone.md"];
        assert_eq!(found, wanted);
    }

    #[test]
    fn code_holds_no_links() {
        assert!(links("`[a](b)`\n```\n[a](b)\n```\n").is_empty());
    }
}
