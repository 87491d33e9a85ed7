//! What the committed PTX says about order: docs/memory-model.md has the argument, and these are the instructions that it
//! rests on.

/// A kernel of a PTX file: its name, and its instructions without those of the functions that it calls.
struct Kernel {
    file: String,
    name: String,
    body: Vec<String>,
}

impl Kernel {
    fn at(&self, instruction: &str) -> Option<usize> {
        self.body.iter().position(|line| line.starts_with(instruction))
    }

    fn count(&self, instruction: &str) -> usize {
        self.body.iter().filter(|line| line.starts_with(instruction)).count()
    }

    fn has(&self, instruction: &str) {
        assert!(self.at(instruction).is_some(), "{} of {}: no {instruction}", self.name, self.file);
    }

    /// Where memory that is not the kernel's own is first touched.
    fn first_access(&self) -> Option<usize> {
        self.body.iter().position(|line| {
            let access = ["ld.", "st.", "atom.", "red.", "multimem.", "call"];
            let own = ["ld.param", "ld.const", "ld.local", "st.local", "st.shared", "st.param"];
            access.iter().any(|word| line.starts_with(word))
                && !own.iter().any(|word| line.starts_with(word))
        })
    }
}

fn kernels() -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (file, text) in symmem::cuda::ptx_files().unwrap() {
        for part in text.split(".entry ").skip(1) {
            let name = part.split('(').next().unwrap().to_owned();
            let body = part.split("\n}").next().unwrap().split('\n');
            let body = body.map(|line| line.trim().trim_start_matches("@%p").to_owned()).collect();
            kernels.push(Kernel { file: file.clone(), name, body });
        }
    }
    assert!(kernels.len() > 100, "{}", kernels.len());
    kernels
}

/// Whether blocks of all ranks synchronise in it by the group's flags.
fn synchronises(kernel: &Kernel) -> bool {
    let others = [
        "put_signal",
        "wait_signal",
        "barrier_on_channel",
        "put_value",
        "wait_value",
        "litmus_signals",
        "litmus_write",
        "litmus_check",
    ];
    !others.contains(&&*kernel.name)
}

/// Data carries its flags there: an epoch in each 8 bytes, which are stored and loaded in one piece.
fn is_flagged(kernel: &Kernel) -> bool {
    kernel.name.ends_with("_flagged")
}

const FLAG_STORES: [&str; 3] =
    ["st.relaxed.sys.global.u64", "st.release.gpu.global.u64", "st.release.sys.global.u64"];
const FLAG_LOADS: [&str; 3] =
    ["ld.relaxed.sys.global.u64", "ld.acquire.gpu.global.u64", "ld.acquire.sys.global.u64"];

#[test]
fn between_devices_every_flag_is_stored_with_release_and_loaded_with_acquire_at_system_scope() {
    for kernel in kernels().iter().filter(|kernel| synchronises(kernel) && !is_flagged(kernel)) {
        for [relaxed, gpu, sys] in [FLAG_STORES, FLAG_LOADS] {
            let (fast, slow) = (kernel.count(relaxed) + kernel.count(gpu), kernel.count(sys));
            let what =
                format!("{} of {}: {fast} {relaxed}, {slow} {sys}", kernel.name, kernel.file);
            assert!(slow > 0 && slow == fast, "one of each for every place: {what}");
        }
    }
}

#[test]
fn on_one_device_what_a_kernel_writes_for_others_is_released_at_its_scope() {
    let writers =
        ["all_reduce_two_shot", "multimem_all_reduce", "multimem_all_gather", "litmus_blocks"];
    for kernel in kernels().iter().filter(|kernel| synchronises(kernel) && !is_flagged(kernel)) {
        if writers.iter().any(|writer| kernel.name.starts_with(writer)) {
            kernel.has("st.release.gpu.global.u64");
        }
        // Whoever reads what others wrote before it began.
        if !["barrier", "all_to_all_v"].contains(&&*kernel.name) {
            kernel.has("ld.acquire.gpu.global.u64");
        }
    }
}

#[test]
fn data_that_carries_its_flags_is_stored_and_loaded_in_pieces_that_hold_both() {
    let kernels = kernels();
    let flagged: Vec<&Kernel> = kernels.iter().filter(|kernel| is_flagged(kernel)).collect();
    let types = symmem::DType::ALL.iter().filter(|dtype| dtype.size() <= 8).count();
    assert_eq!(flagged.len(), 2 * (types + 3), "two of each type, and of those for newer devices");
    for kernel in flagged {
        kernel.has("st.relaxed.sys.global.v2.u64");
        kernel.has("ld.relaxed.sys.global.v2.u64");
    }
}

#[test]
fn signals_are_release_and_acquire_at_both_scopes() {
    for kernel in kernels() {
        let puts = ["put_signal", "barrier_on_channel", "litmus_signals"];
        let waits = ["wait_signal", "barrier_on_channel", "litmus_signals"];
        if puts.contains(&&*kernel.name) {
            let swap = kernel.at("atom.relaxed.sys.global.cas.b32").unwrap();
            for fence in ["fence.acq_rel.gpu", "fence.acq_rel.sys"] {
                assert!(kernel.at(fence).unwrap() < swap, "{}: {fence} before", kernel.name);
            }
        }
        if waits.contains(&&*kernel.name) {
            kernel.has("atom.acquire.gpu.global.cas.b32");
            kernel.has("atom.acquire.sys.global.cas.b32");
        }
        if kernel.name == "put_value" {
            FLAG_STORES[1..].iter().for_each(|store| kernel.has(store));
        }
        if kernel.name == "wait_value" {
            FLAG_LOADS[1..].iter().for_each(|load| kernel.has(load));
        }
    }
}

/// The epoch as well, which the kernel before it has written.
#[test]
fn what_may_be_launched_early_touches_no_memory_before_it_has_waited() {
    for kernel in kernels() {
        let (wait, next) = (kernel.at("griddepcontrol.wait"), kernel.at("griddepcontrol.launch"));
        let what = format!("{} of {}", kernel.name, kernel.file);
        if !kernel.file.ends_with("_90") && !kernel.file.starts_with("multimem") {
            assert_eq!((wait, next), (None, None), "{what}: for all devices");
            continue;
        }
        let wait = wait.unwrap_or_else(|| panic!("{what} does not wait"));
        assert!(kernel.first_access().is_none_or(|access| wait < access), "{what}");
        assert!(next.is_none_or(|next| wait < next), "{what}: never more than two at once");
        assert_eq!(next.is_some(), synchronises(&kernel), "{what}");
    }
}
