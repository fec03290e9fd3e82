//! Applications of a trace: it has numbers, and a server has names.

use std::collections::BTreeMap;

use larder_base::AppId;
use larder_base::lock::LockKind;
use larder_engine::dram::ObjectMemory;
use larder_engine::kv::node::Node;

/// Which application of the engine a trace's is.
#[derive(Debug)]
pub(super) struct Apps {
    /// Names by the trace's numbers, where they have some.
    names: BTreeMap<u32, String>,
    /// Those that have come. As many as the engine has numbers for, or names.
    known: BTreeMap<u32, AppId>,
}

impl Apps {
    pub(super) fn new(names: BTreeMap<u32, String>) -> Apps {
        Apps { names, known: BTreeMap::new() }
    }

    /// The engine's number of the application that the trace calls `number`: the node gives them out in the order in which
    /// applications first come, as it does where they are prefixes of keys.
    pub(super) fn of<L: LockKind, M: ObjectMemory>(
        &mut self,
        node: &Node<L, M>,
        number: u32,
    ) -> AppId {
        if let Some(&app) = self.known.get(&number) {
            return app;
        }
        let registered = match self.names.get(&number) {
            Some(name) => node.application(name),
            None if number == 0 => Ok(AppId::DEFAULT),
            None => node.application(&number.to_string()),
        };
        // One more than can be told apart. (That a name may be one was seen to before.)
        let Ok(app) = registered else { return AppId::OTHER };
        self.known.insert(number, app);
        app
    }
}
