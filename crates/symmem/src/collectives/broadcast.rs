//! Broadcast: every rank gets one rank's elements.

use super::copy_elements;
use crate::dtype::Element;
use crate::error::Result;
use crate::group::{Call, Op, Way};
use crate::symmetric::Symmetric;

const NAME: &str = "broadcast";

impl<T: Element> Symmetric<T> {
    /// In place: the elements become those of rank `root`. Collective.
    pub fn broadcast(&mut self, root: usize) -> Result<()> {
        self.group().check_rank(NAME, root)?;
        let len = self.len();
        let call = |way| Call { root: Some(root), ..self.call(const { Op::of(NAME) }, way) };
        if self.is_small() {
            let is_root = self.group().rank() == root;
            return self.staged(call(Way::Staged), 0..len, is_root, |from, own| {
                if let Some(&from) = from.get(root).filter(|_| !is_root) {
                    // SAFETY: the root has laid out `len` elements, and our part has as many.
                    unsafe { copy_elements(from, own, len) };
                }
            });
        }
        self.collective(call(Way::Direct), |session| {
            if session.rank() != root {
                let own = session.part(session.rank(), 0);
                // SAFETY: both have `len` elements; nobody writes the root's, nobody else touches ours.
                unsafe { copy_elements(session.part(root, 0).cast_const(), own, len) };
            }
            Ok(())
        })
    }
}
