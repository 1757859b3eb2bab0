//! `apply` computes the batch of one operation from the present metadata. It has no side effects: it reads the view and the context and changes
//! nothing, so that live and replayed operations are handled alike.
//!
//! The rules of POSIX are here, as pjdfstest and xfstests check them on Linux. Permissions are not checked here: the client's kernel checks them
//! (`default_permissions`), and the RPC layer checks those of the export.

mod acl;
mod attributes;
mod data;
mod marks;
mod names;
mod privileges;

pub(super) use attributes::mark_of;

use super::draft::{Applied, Draft};
use super::error::MetaError;
use super::key;
use super::operation::{ApplyContext, Operation, Outcome};
use super::record::{self, ClientRecord, InodeRecord};
use super::view::View;

/// Computes the effect of `operation` on the metadata in `view`.
///
/// # Errors
/// [`MetaError::Refused`] if POSIX forbids it; others if the metadata cannot be read.
pub fn apply(
    view: &View<'_>,
    operation: &Operation<'_>,
    context: &ApplyContext<'_>,
) -> Result<Applied, MetaError> {
    let mut draft = Draft::new(*view);
    let d = &mut draft;
    let outcome = match operation {
        Operation::Make { parent, name, node, mode } => names::make(d, context, *parent, name, node, *mode),
        Operation::Create { parent, name, mode, exclusive } => {
            names::create(d, context, *parent, name, *mode, *exclusive)
        }
        Operation::CreateNameless { parent, mode } => names::create_nameless(d, context, *parent, *mode),
        Operation::Link { ino, parent, name } => names::link(d, context, *ino, *parent, name),
        Operation::Unlink { parent, name } => names::unlink(d, context, *parent, name),
        Operation::Rmdir { parent, name } => names::rmdir(d, context, *parent, name),
        Operation::Rename { parent, name, new_parent, new_name, mode } => {
            names::rename(d, context, (*parent, name), (*new_parent, new_name), *mode)
        }
        Operation::SetAttr { ino, set, commit } => {
            attributes::set_attr(d, context, *ino, set, commit.as_deref())
        }
        Operation::SetXattr { ino, name, value, mode } => {
            attributes::set_xattr(d, context, *ino, name, value, *mode)
        }
        Operation::DropPrivileges { ino } => privileges::drop_privileges(d, context, *ino),
        Operation::RemoveXattr { ino, name } => attributes::remove_xattr(d, context, *ino, name),
        Operation::CommitData { commits, stamps } => data::commit_data(d, commits, stamps),
        Operation::ReapOrphan { ino, below } => data::reap_orphan(d, context, *ino, *below),
        Operation::PutClient { client, owner } => {
            let record = ClientRecord { has_session: true, owner: owner.clone() };
            d.batch.put(key::client(*client), record::encode(&record));
            Ok(Outcome::default())
        }
        Operation::EndSession { client } => {
            if let Some(record) = d.view.client(*client)? {
                let record = ClientRecord { has_session: false, ..record };
                d.batch.put(key::client(*client), record::encode(&record));
            }
            Ok(Outcome::default())
        }
        Operation::RemoveClient { client } => {
            let keys = d.view.keys(&key::all_of_client(*client))?;
            keys.into_iter().for_each(|key| d.batch.remove(key));
            Ok(Outcome::default())
        }
    }?;
    draft.finish(outcome)
}

/// Notes a change of a directory's contents.
fn touch_contents(record: &mut InodeRecord, context: &ApplyContext<'_>) {
    record.mtime = context.now;
    touch_inode(record, context);
}

/// Notes a change of the inode itself.
fn touch_inode(record: &mut InodeRecord, context: &ApplyContext<'_>) {
    record.ctime = context.now;
    record.change = context.next_change(record.change);
}
