//! What a run of a program came to, and how workers tell it.

use std::collections::BTreeMap;

/// One promise that was not kept.
#[derive(Clone, Debug)]
pub struct Violation {
    /// A few words, the same for the same kind of flaw.
    pub class: String,
    pub text: String,
}

#[derive(Clone, Debug, Default)]
pub struct Report {
    pub calls: u64,
    pub errors: BTreeMap<String, u64>,
    pub faults: BTreeMap<String, u64>,
    pub violations: Vec<Violation>,
}

impl Report {
    pub fn add(&mut self, other: &Self) {
        self.calls += other.calls;
        for (kind, count) in &other.errors {
            *self.errors.entry(kind.clone()).or_default() += count;
        }
        for (kind, count) in &other.faults {
            *self.faults.entry(kind.clone()).or_default() += count;
        }
    }

    pub fn violation(class: &str, text: impl Into<String>) -> Self {
        let violation = Violation { class: class.to_owned(), text: text.into() };
        Self { violations: vec![violation], ..Self::default() }
    }

    /// The report of the lines that `print` wrote.
    pub fn parse(lines: &[String]) -> Self {
        let mut report = Self::default();
        for line in lines {
            let mut words = line.splitn(3, '\t');
            let (tag, key, value) = (words.next(), words.next(), words.next());
            let (Some(tag), Some(key), Some(value)) = (tag, key, value) else { continue };
            let number = || value.parse().unwrap_or(0);
            match tag {
                "calls" => report.calls = number(),
                "error" => drop(report.errors.insert(key.to_owned(), number())),
                "fault" => drop(report.faults.insert(key.to_owned(), number())),
                _ => {
                    let (class, text) = (key.to_owned(), value.replace("\\n", "\n"));
                    report.violations.push(Violation { class, text });
                }
            }
        }
        report
    }
}

/// On standard output, for the process that started this one.
pub fn print(report: &Report) {
    println!("calls\t-\t{}", report.calls);
    for (kind, count) in &report.errors {
        println!("error\t{kind}\t{count}");
    }
    for (kind, count) in &report.faults {
        println!("fault\t{kind}\t{count}");
    }
    for violation in &report.violations {
        println!("wrong\t{}\t{}", violation.class, violation.text.replace('\n', "\\n"));
    }
}
