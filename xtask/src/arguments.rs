//! The arguments of a task: options with or without a value, nothing else.

use std::str::FromStr;

use anyhow::{Context, Result, bail};

pub(crate) struct Arguments(Vec<String>);

impl Arguments {
    pub(crate) fn new(arguments: impl IntoIterator<Item = String>) -> Self {
        Self(arguments.into_iter().collect())
    }

    /// The value after `option`, taken out, if the option is there.
    pub(crate) fn take<T: FromStr>(&mut self, option: &str) -> Result<Option<T>> {
        let Some(at) = self.0.iter().position(|argument| argument == option) else {
            return Ok(None);
        };
        self.0.remove(at);
        if at == self.0.len() {
            bail!("{option} needs a value");
        }
        let value = self.0.remove(at);
        let parsed = value.parse().ok().with_context(|| format!("{option} {value}: not valid"))?;
        Ok(Some(parsed))
    }

    /// Whether `option` is there, taken out.
    pub(crate) fn flag(&mut self, option: &str) -> bool {
        let found = self.0.iter().position(|argument| argument == option);
        found.map(|at| self.0.remove(at)).is_some()
    }

    /// Fails if an argument was not taken.
    pub(crate) fn finish(self) -> Result<()> {
        match self.0.first() {
            Some(argument) => bail!("unexpected argument {argument}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments(list: &[&str]) -> Arguments {
        Arguments::new(list.iter().map(ToString::to_string))
    }

    #[test]
    fn an_option_is_taken_with_its_value() {
        let mut given = arguments(&["--seconds", "5"]);
        assert_eq!(given.take::<u64>("--rounds").unwrap(), None);
        assert_eq!(given.take::<u64>("--seconds").unwrap(), Some(5));
        given.finish().unwrap();
    }

    #[test]
    fn a_flag_is_there_or_not() {
        let mut given = arguments(&["--check"]);
        assert!(given.flag("--check"));
        assert!(!given.flag("--check"));
        given.finish().unwrap();
    }

    #[test]
    fn a_missing_or_bad_value_and_a_stranger_are_errors() {
        assert!(arguments(&["--seconds"]).take::<u64>("--seconds").is_err());
        assert!(arguments(&["--seconds", "x"]).take::<u64>("--seconds").is_err());
        assert!(arguments(&["--what"]).finish().is_err());
    }
}
